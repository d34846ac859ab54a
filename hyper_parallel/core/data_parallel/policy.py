"""Dtypes in which fully sharded modules compute and reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a fully sharded module; shards, gradients of shards and optimizer state keep the parameters' dtype.

    Attributes:
        param_dtype: dtype of the gathered parameters, in which forward and backward compute; None keeps it.
        reduce_dtype: dtype in which gradients are accumulated without reduction, and reduced; None stands for
            ``param_dtype``.
        output_dtype: dtype of floating outputs; None leaves them as they are.
        cast_forward_inputs: whether to cast floating inputs to ``param_dtype``, if that is given.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards are kept in host memory; has no effect if the CPU computes.

    Attributes:
        pin_memory: accepted as in PyTorch's signature, without effect.
    """

    pin_memory: bool = True

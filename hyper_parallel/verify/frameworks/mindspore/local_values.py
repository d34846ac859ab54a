"""Reads a rank's MindSpore tensor as a NumPy array, and its region in the global tensor if it is known."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.transport.frontends.mindspore_comm.host import overwrite, to_host
from hyper_parallel.transport.host.numpy_ops import BFLOAT16, widen
from hyper_parallel.verify.frameworks.contract.records import LocalValue, Region, region_of

__all__ = ["read_tensor", "write_tensor"]


def read_tensor(value: Any) -> LocalValue | None:
    """Return a copy of a rank's shard of a tensor; None if ``value`` is not a tensor.

    Args:
        value: any object. The result for a DTensor has a region; bfloat16 and float16 become float32.
    """
    if isinstance(value, DTensor):
        return _read(value._local, region_of(value))
    return _read(value) if isinstance(value, Tensor) else None


def write_tensor(value: Any, array: Any) -> None:
    """Write values into the storage of a tensor, or of the local tensor of a DTensor."""
    local = value._local if isinstance(value, DTensor) else value
    overwrite(local, array)


def _read(tensor: Tensor, region: Region | None = None) -> LocalValue:
    array = to_host(tensor)
    if array.dtype == BFLOAT16:
        return LocalValue(widen(array), region, "bfloat16")
    if array.dtype == np.float16:
        return LocalValue(np.array(array, dtype=np.float32), region, "float16")
    return LocalValue(np.array(array), region)

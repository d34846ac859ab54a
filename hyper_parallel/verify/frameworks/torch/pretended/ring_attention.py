"""Runs PyTorch's ring attention, which context parallelism uses, with CPU kernels instead of a device's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.platform.torch.versions import (
    context_parallel,
    flash_attention,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
    op_dispatcher,
)
from hyper_parallel.verify.frameworks.torch.pretended.device import ASKED

__all__ = ["offer_ring_attention"]

_FORWARD, _BACKWARD, _DEVICE = flash_attention_on_cpu, flash_attention_on_cpu_backward, flash_attention
_SEQUENCE = 2
"""The dim of tokens in queries, keys and values."""


def offer_ring_attention() -> None:
    """Let attention of DTensors run on the CPU if the program has enabled context parallelism."""
    op_dispatcher._custom_op_handlers |= {_FORWARD: _forward, _BACKWARD: _backward}  # noqa: SLF001 - as PyTorch does


def _ring() -> Any:
    """Return PyTorch's module of ring attention.

    Raises:
        NotImplementedError: the program has not enabled context parallelism; PyTorch raises the same on the CPU.
    """
    if _DEVICE not in op_dispatcher._custom_op_handlers:  # noqa: SLF001 - as above
        msg = f"Operator {_FORWARD} does not have a sharding strategy registered."
        raise NotImplementedError(msg)
    ASKED["rings of attention"] += 1
    return context_parallel


def _forward(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the attention output and log-sum-exp of a rank's queries."""
    del operator
    query, key, value = args[:3]
    rest = dict(zip(("dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    local = {"query": query.to_local(), "key": key.to_local(), "value": value.to_local()}
    group = query.device_mesh.get_group()
    options = {"is_causal": False, **rest}
    output, sums = _ring()._templated_ring_attention(group, _SEQUENCE, _FORWARD, **local, **options)  # noqa: SLF001 - the ring
    shape = query.shape[:-1]
    strides = torch.empty(shape, device="meta").stride()
    return _like(query, output), DTensor.from_local(
        sums, query.device_mesh, query.placements, run_check=False, shape=shape, stride=strides
    )


def _backward(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a rank's queries, keys and values."""
    del operator
    gradient, query, key, value, output, sums, dropout, causal = args
    gradient = gradient.redistribute(placements=output.placements)
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = (gradient, query, key, value, output, sums)
    local = {name: tensor.to_local() for name, tensor in zip(names, tensors, strict=True)}
    group = query.device_mesh.get_group()
    options = {"dropout_p": dropout, "is_causal": causal, **kwargs}
    found = _ring()._templated_ring_attention_backward(  # noqa: SLF001 - the ring
        group, _SEQUENCE, _BACKWARD, grad_out_name="grad_out", **local, **options
    )
    return tuple(_like(tensor, part) for tensor, part in zip((query, key, value), found[:3], strict=True))


def _like(tensor: Any, local: Any) -> Any:
    """Return a DTensor with the placements of ``tensor`` and the local tensor ``local``."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )

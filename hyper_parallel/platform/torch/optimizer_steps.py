"""Optimizer steps on local tensors: one conversion per step, in place of one per operator and list.

The functions that PyTorch's optimizers call (``torch.optim.adam.adam``, …) take lists: parameters, gradients and state.
A step is elementwise, so where all tensors of a row have one layout, every rank steps its own shards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter, is_
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.skip_dispatch import open_blocks
from hyper_parallel.platform.torch.dtensor import TorchDTensor

__all__ = ["on_local_tensors", "sparse_on_local_tensors"]

Step = Callable[..., None]
_LAYOUT, _LOCAL, _READONLY = attrgetter("_layout"), attrgetter("_local"), attrgetter("_readonly")
_DISTRIBUTED = {TorchDTensor}
# Options with which a step is more than elementwise operations on the lists.
_DISPATCHED = ("differentiable", "fused", "grad_scale", "found_inf")


def on_local_tensors(step: Step) -> Step:
    """Return ``step``, a function of ``torch.optim``, which runs once on local tensors where that is the same.

    Where it is not (a row with several layouts, a pending reduction, a tensor that may not be written, state that is
    still to be made, an option that is not elementwise), its operators are dispatched one by one.
    """

    @wraps(step)
    def call(*lists: Any, **options: Any) -> None:
        columns = _local_lists(lists, options)
        step(*(lists if columns is None else columns), **options)

    call.__dict__["__prepare_scriptable__"] = lambda: step  # TorchScript compiles steps of torch.distributed.optim
    return call


def sparse_on_local_tensors(step: Step) -> Step:
    """As :func:`on_local_tensors`, but sparse gradients are stepped one by one, since mixed ones cannot be dispatched.

    Args:
        step: a function of ``torch.optim`` that leaves its lists as they are; without the option ``has_sparse_grad``,
            all gradients are sparse.
    """
    local = on_local_tensors(step)

    @wraps(step)
    def call(*lists: Any, **options: Any) -> None:
        if not options.get("has_sparse_grad", True):
            local(*lists, **options)
            return
        for row in zip(*lists, strict=True):
            local(*([value] for value in row), **options)

    call.__dict__["__prepare_scriptable__"] = lambda: step
    return call


def _local_lists(lists: tuple[Any, ...], options: dict[str, Any]) -> list[Any] | None:
    """The lists with local tensors, whose DTensors forget what was derived from their values; None to dispatch."""
    if not lists or not _are_distributed(lists[0]):
        return None
    if open_blocks() or torch.is_grad_enabled() or any(map(options.get, _DISPATCHED)):
        return None
    if any(isinstance(value, DTensor) for value in options.values()):
        return None
    layouts = list(map(_LAYOUT, lists[0]))
    if any(layout.partials for layout in set(layouts)):
        return None
    columns = [_local_list(values, layouts) for values in lists]
    if any(column is None for column in columns):
        return None
    for values, column in zip(lists, columns, strict=True):
        if values is not column:
            for tensor in values:
                tensor.drop_views()
    return columns


def _are_distributed(values: Any) -> bool:
    return type(values) is list and set(map(type, values)) == _DISTRIBUTED


def _local_list(values: Any, layouts: list[Any]) -> list[Any] | None:
    """Local tensors of DTensors in ``layouts`` that may be written, or counters as they are; None for other lists."""
    if _are_distributed(values):
        same = len(values) == len(layouts) and all(map(is_, map(_LAYOUT, values), layouts))
        return list(map(_LOCAL, values)) if same and not any(map(_READONLY, values)) else None
    counters = type(values) is list and all(
        type(value) is int or (type(value) is torch.Tensor and not value.ndim) for value in values
    )
    return values if counters else None

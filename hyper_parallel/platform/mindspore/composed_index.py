"""MindSpore's gathering and scattering operators that are several canonical ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.indexing import positions, replicated
from hyper_parallel.platform.mindspore.primitives import composed, expect

__all__: list[str] = []


def _places(ops: Any, index: Any, at: int, size: int) -> Any:
    """Column ``at`` of an index whose rows are places; this rank looks at its own, where that costs nothing.

    Raises:
        IndexError: a place does not exist, which MindSpore refuses too.
    """
    found = ops.select(index, -1, at)
    local = found._local if isinstance(found, DTensor) else found
    if local.size and str(local.device).upper().startswith("CPU"):
        values = local.asnumpy()
        outside = values[(values < 0) | (values >= size)]
        if outside.size:
            msg = f"index {int(outside[0])} does not exist in dim {at} of size {size}"
            raise IndexError(msg)
    return found


@composed("GatherNd")
def _gather_nd(ops: Any, _: Any, x: Any, index: Any) -> Any:
    """The last dim of the index names a place in the first dims of ``x``."""
    return ops.index(x, tuple(_places(ops, index, at, x.shape[at]) for at in range(index.shape[-1])))


@composed("MaskedSelect")
def _masked_select(ops: Any, _: Any, x: Any, mask: Any) -> Any:
    """The mask's values decide the size of the result: it is gathered."""
    shape = np.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    like = x if isinstance(x, DTensor) else mask
    x, mask = ops.expand(x, shape), ops.expand(mask, shape)
    return ops.index(x, tuple(positions(mask, like)))


@composed("Take")
def _take(ops: Any, _: Any, x: Any, index: Any) -> Any:
    return ops.index(ops.view(x, (-1,)), (index,))


def _rows(ops: Any, x: Any, index: Any, updates: Any) -> tuple[Any, Any, Any]:
    """``x`` with the dims that the index names made one, the index into that dim, and the updates likewise."""
    depth = index.shape[-1]
    places = None
    for at in range(depth):
        step = ops.mul(_places(ops, index, at, x.shape[at]), math.prod(x.shape[at + 1 : depth]))
        places = step if places is None else ops.add(places, step)
    rest = tuple(x.shape[depth:])
    return ops.view(x, (-1, *rest)), ops.view(places, (-1,)), ops.view(updates, (-1, *rest))


@composed("TensorScatterAdd")
def _scatter_nd_add(ops: Any, _: Any, x: Any, index: Any, updates: Any) -> Any:
    rows, places, values = _rows(ops, x, index, updates)
    return ops.view(ops.index_add(rows, 0, places, values), tuple(x.shape))


@composed("TensorScatterSub")
def _scatter_nd_sub(ops: Any, _: Any, x: Any, index: Any, updates: Any) -> Any:
    return _scatter_nd_add(ops, _, x, index, ops.neg(updates))


@composed("ScatterNd")
def _scatter_nd(ops: Any, _: Any, index: Any, updates: Any, shape: Sequence[int]) -> Any:
    """Added into zeros."""
    return _scatter_nd_add(ops, _, ops.new_zeros(updates, tuple(shape)), index, updates)


@composed("TensorScatterUpdate")
def _scatter_nd_update(ops: Any, _: Any, x: Any, index: Any, updates: Any) -> Any:
    rows, places, values = _rows(ops, x, index, updates)
    wide = ops.expand(ops.view(places, (-1, *(1,) * (len(rows.shape) - 1))), tuple(values.shape))
    return ops.view(ops.scatter(rows, 0, wide, values), tuple(x.shape))


@composed("TensorScatterElements")
def _scatter_elements(ops: Any, _: Any, x: Any, index: Any, updates: Any, axis: int = 0, reduction: Any = 0) -> Any:
    """Writing, or adding (1); the index may have been made by MindSpore's Python layer."""
    index = index if isinstance(index, DTensor) else replicated(index, x)
    return (ops.scatter_add if reduction in (1, "add") else ops.scatter)(x, axis, index, updates)


@composed("UnsortedSegmentSum")
def _segment_sum(ops: Any, _: Any, x: Any, segments: Any, count: int) -> Any:
    """Rows added into numbered segments; those of negative numbers are left out."""
    rest = tuple(x.shape[len(segments.shape) :])
    zeros = ops.new_zeros(x, (count, *rest))
    numbers, rows = ops.view(segments, (-1,)), ops.view(x, (-1, *rest))
    left_out = ops.view(ops.lt(numbers, 0), (-1, *(1,) * len(rest)))
    return ops.index_add(zeros, 0, ops.clamp(numbers, min=0), ops.where(left_out, 0, rows))


@composed("IndexFill")
def _index_fill(ops: Any, _: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    """Rows along ``dim`` become ``value``."""
    at = (dim.asnumpy().item() if isinstance(dim, Tensor) else dim) % len(x.shape)
    if isinstance(value, DTensor):
        msg = "operator IndexFill: a DTensor as value has no sharding rule; pass a Python number"
        raise UnsupportedOperatorError(msg)
    number = value.asnumpy().item() if isinstance(value, Tensor) else value
    shape = (*x.shape[:at], index.shape[0], *x.shape[at + 1 :])
    wide = ops.expand(ops.view(index, tuple(-1 if one == at else 1 for one in range(len(shape)))), shape)
    return ops.scatter(x, at, wide, ops.new_full(x, shape, number))


@composed("OneHotExt")
def _one_hot(ops: Any, _: Any, x: Any, classes: int, on: Any = 1, off: Any = 0, axis: int = -1) -> Any:
    """Behind ``mint.nn.functional.one_hot``, which passes one and zero."""
    found = [one.asnumpy().item() if isinstance(one, Tensor) else one for one in (on, off)]
    expect("OneHotExt", "on_value, off_value, axis", [*found, axis], [1, 0, -1])
    return ops.one_hot(x, classes)

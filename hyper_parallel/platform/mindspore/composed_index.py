"""MindSpore's gathering and scattering operators that are several canonical ones."""

from __future__ import annotations

import math
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.indexing import positions, replicated
from hyper_parallel.platform.mindspore.primitives import composed, expect

__all__: list[str] = []


def _check_places(index: Any, sizes: tuple[int, ...]) -> None:
    """MindSpore refuses places outside of a tensor; this rank looks at its own, where that costs nothing.

    Raises:
        IndexError: a place does not exist.
    """
    local = index._local if isinstance(index, DTensor) else index  # noqa: SLF001 - its own piece
    if not local.size or not str(local.device).upper().startswith("CPU"):
        return
    values = local.asnumpy().reshape(-1, len(sizes))
    outside = ((values < 0) | (values >= np.array(sizes))).any(axis=1)
    if outside.any():
        msg = f"index {values[outside][0].tolist()} does not exist in dims of sizes {list(sizes)}"
        raise IndexError(msg)


@composed("GatherNd")
def _gather_nd(ops: Any, _: Any, x: Any, index: Any) -> Any:
    """The last dim of the index names a place in the first dims of ``x``."""
    _check_places(index, tuple(x.shape[: index.shape[-1]]))
    return ops.index(x, tuple(ops.select(index, -1, at) for at in range(index.shape[-1])))


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
    _check_places(index, tuple(x.shape[:depth]))
    places = None
    for at in range(depth):
        step = ops.mul(ops.select(index, -1, at), math.prod(x.shape[at + 1 : depth]))
        places = step if places is None else ops.add(places, step)
    rest = tuple(x.shape[depth:])
    return ops.view(x, (-1, *rest)), ops.view(places, (-1,)), ops.view(updates, (-1, *rest))


@composed("TensorScatterAdd", "TensorScatterSub", "ScatterNd", "TensorScatterUpdate")
def _scatter_nd(ops: Any, primitive: Any, x: Any, index: Any, updates: Any) -> Any:
    """Of ``ScatterNd`` the first argument is the index, and the last the shape of the zeros that are added to."""
    if primitive.name == "ScatterNd":
        x, index, updates = ops.new_zeros(index, tuple(updates), dtype=index.dtype), x, index
    rows, places, values = _rows(ops, x, index, updates)
    if primitive.name == "TensorScatterUpdate":
        wide = ops.expand(ops.view(places, (-1, *(1,) * (len(rows.shape) - 1))), tuple(values.shape))
        found = ops.scatter(rows, 0, wide, values)
    else:
        found = ops.index_add(rows, 0, places, values, alpha=-1 if primitive.name == "TensorScatterSub" else 1)
    return ops.view(found, tuple(x.shape))


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

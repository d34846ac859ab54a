"""Tensor methods that mean something else than the function which arrives under the same operator name.

MindSpore picks the meaning of some methods by device: on CPU it falls back to older ones, with other defaults.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore.common.api import _no_grad

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.composed_shape import on_diagonals
from hyper_parallel.platform.mindspore.primitives import METHOD, composed, expect
from hyper_parallel.platform.mindspore.writing import write_over

__all__: list[str] = []


def _older(x: Any) -> bool:
    return str(x._local.device).upper().startswith("CPU")


@composed(METHOD + "Std")
def _std(ops: Any, _: Any, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """On CPU nothing is subtracted from the count, unless it is said."""
    chosen = (0 if _older(x) else 1) if correction is None else correction
    return ops.std(x, dim, correction=chosen, keepdim=keepdim)


@composed(METHOD + "ArgMinExt")
def _argmin(ops: Any, _: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """On CPU places are 32-bit numbers."""
    found = ops.argmin(x, dim, keepdim)
    return ops.cast(found, dtype=mindspore.int32) if _older(x) else found


@composed("DeprecatedArgmin")
def _argmin_along(ops: Any, _: Any, x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    return ops.cast(ops.argmin(x, axis, keepdims), dtype=mindspore.int32)


@composed(METHOD + "CountNonZero")
def _count_nonzero(ops: Any, _: Any, x: Any, dim: Any = None) -> Any:
    """On CPU counts are 32-bit numbers."""
    found = ops.count_nonzero(x, dim)
    return ops.cast(found, dtype=mindspore.int32) if _older(x) else found


def _counted(x: Any) -> Any:
    """The dtype of places and counts: on CPU 32-bit numbers."""
    return mindspore.int32 if _older(x) else mindspore.int64


@composed(METHOD + "SortExt")
def _sort(ops: Any, _: Any, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    values, places = ops.sort(x, dim, descending, stable)
    return values, ops.cast(places, dtype=_counted(x))


@composed("DeprecatedSort")
def _sort_along(ops: Any, _: Any, x: Any, axis: int = -1, descending: bool = False) -> Any:
    values, places = ops.sort(x, axis, descending)
    return values, ops.cast(places, dtype=mindspore.int32)


@composed(METHOD + "ArgSort")
def _argsort(ops: Any, _: Any, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    return ops.cast(ops.argsort(x, dim, descending, stable), dtype=_counted(x))


@composed("DeprecatedArgsort")
def _argsort_along(ops: Any, _: Any, x: Any, axis: int = -1, descending: bool = False) -> Any:
    return ops.cast(ops.argsort(x, axis, descending), dtype=mindspore.int32)


@composed(METHOD + "TopkExt")
def _topk(ops: Any, _: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002 - MindSpore's name
    values, places = ops.topk(x, k, dim, largest, sorted)
    return values, ops.cast(places, dtype=_counted(x))


@composed(METHOD + "BincountExt")
def _bincount(ops: Any, _: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """On CPU counts are float32, and so is what weights sum to."""
    found = ops.bincount(x, weights, minlength)
    return ops.cast(found, dtype=mindspore.float32) if _older(x) else found


@composed(METHOD + "MedianExt", "DeprecatedMedian")
def _median(ops: Any, _: Any, x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """On CPU along the last dim, unless another one is said, and with the places."""
    if axis is None and not _older(x):
        return ops.median_all(x)
    return ops.median_along(x, -1 if axis is None else axis, keepdims)


@composed(METHOD + "DiagExt")
def _diag(ops: Any, _: Any, x: Any, offset: int = 0) -> Any:
    """On CPU a matrix becomes a diagonal of four dims, for which there is no rule; elsewhere its diagonal is taken."""
    if len(x.shape) == 1:
        return on_diagonals(ops, x, offset)
    expect("Tensor.diag", "the number of dims on CPU", _older(x), False)
    return ops.diagonal(x, offset, 0, 1)


@composed("DeprecatedCumsum")
def _cumsum(ops: Any, _: Any, x: Any, axis: int | None = None, dtype: Any = None) -> Any:
    """Without an axis, of all elements in a row; truths are counted."""
    dtype = mindspore.int32 if dtype is None and x.dtype == mindspore.bool_ else dtype
    x = x if dtype is None else ops.cast(x, dtype=dtype)
    return ops.cumsum(ops.view(x, (-1,)), 0) if axis is None else ops.cumsum(x, axis)


@composed("DeprecatedRepeatInterleave")
def _repeat_interleave(ops: Any, _: Any, x: Any, repeats: int, dim: int | None = None) -> Any:
    return ops.repeat_interleave(x, repeats, dim)


@composed("DeprecatedAllclose", METHOD + "AllClose")
def _allclose(
    ops: Any, _: Any, x: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    return bool(ops.all(ops.isclose(x, other, rtol, atol, equal_nan)).item())


@composed("DeprecatedGather")
def _gather(ops: Any, _: Any, x: Any, index: Any, axis: int, batch_dims: int = 0) -> Any:
    """Rows along ``axis``, as ``ops.gather``."""
    from hyper_parallel.platform.mindspore.primitives import gather_rows

    return gather_rows(ops, x, index, axis, batch_dims)


@composed("TraceV2")
def _trace(ops: Any, _: Any, x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    return ops.sum(ops.diagonal(x, offset, axis1, axis2), -1, dtype=dtype)


# -- writing -----------------------------------------------------------------------------------------------------------


def _into(x: Any, result: Any) -> Any:
    """``result`` written into ``x``, which is returned."""
    if not isinstance(x, DTensor):  # a piece, where dispatch is left out
        return write_over(x, result)
    written: Any = x
    written.copy_(result)
    return x


@composed("Assign", "AssignAdd", "AssignSub")
def _assign(ops: Any, primitive: Any, x: Any, value: Any) -> Any:
    """MindSpore writes and records nothing for backward: right for parameters and buffers, wrong for results.

    Raises:
        UnsupportedOperatorError: gradients flow through ``x``.
    """
    local = x._local if isinstance(x, DTensor) else x
    if local._requires_grad and not local._is_leaf:  # noqa: SLF001 - no public spelling
        msg = f"operator {primitive.name}: MindSpore's derivative of it is none; use the in-place methods of tensors"
        raise UnsupportedOperatorError(msg)
    with _no_grad():
        result = {
            "Assign": lambda: value,
            "AssignAdd": lambda: ops.add(x, value),
            "AssignSub": lambda: ops.sub(x, value),
        }
        return _into(x, result[primitive.name]())


@composed("InplaceAddmm")
def _addmm(ops: Any, _: Any, x: Any, left: Any, right: Any, beta: float = 1, alpha: float = 1) -> Any:
    return _into(x, ops.addmm(x, left, right, beta=beta, alpha=alpha))


@composed("InplaceAddr")
def _addr(ops: Any, _: Any, x: Any, left: Any, right: Any, beta: float = 1, alpha: float = 1) -> Any:
    outer = ops.outer(left, right)
    return _into(x, ops.add(ops.mul(x, beta), ops.mul(outer, alpha)))


@composed("InplaceScatterSrc")
def _scatter(ops: Any, _: Any, x: Any, dim: int, index: Any, src: Any) -> Any:
    return _into(x, ops.scatter(x, dim, index, src))


@composed("InplaceIndexCopy")
def _index_copy(ops: Any, _: Any, x: Any, dim: int, index: Any, source: Any) -> Any:
    return _into(x, ops.scatter(x, dim, _along(ops, x, dim, index, tuple(source.shape)), source))


@composed("InplaceIndexFillScalar")
def _index_fill(ops: Any, _: Any, x: Any, dim: int, index: Any, value: float) -> Any:
    at = dim % len(x.shape)
    shape = (*x.shape[:at], index.shape[0], *x.shape[at + 1 :])
    return _into(x, ops.scatter(x, dim, _along(ops, x, dim, index, shape), ops.new_full(x, shape, value)))


def _along(ops: Any, x: Any, dim: int, index: Any, shape: tuple[int, ...]) -> Any:
    """A vector of places along ``dim``, stretched to ``shape``."""
    at = dim % len(x.shape)
    return ops.expand(ops.view(index, tuple(-1 if one == at else 1 for one in range(len(shape)))), shape)

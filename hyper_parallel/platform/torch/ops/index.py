"""PyTorch's indexing, and functions with results whose size depends on values.

These functions gather the tensor that determines the size (a mask, class numbers), then run an operator with known
sizes.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, local_op, spelling

__all__ = ["Window", "dispatch", "gathered", "is_mask", "normal_index", "plain_entry", "with_zeros", "within"]

spelling("gather", "gather", aten.gather.default)
spelling("index_select", "index_select", aten.index_select.default)
spelling("take_along_dim")
spelling("take", "take", aten.take.default)


# The first and one past the last index of a dim on this rank, and the dim's global size.
Window = tuple[int, int, int]


def within(x: Tensor, dim: int, index: Tensor, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """Return the local table, indices into it, and a mask of those that are on this rank.

    An empty table gets one row of zeros.

    Raises:
        IndexError: an index is outside of the global dim; on devices, the local operation asserts it.
    """
    start, stop, size = window
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        msg = f"index out of range: indices are {int(index.min())} to {int(index.max())}, the dim has size {size}"
        raise IndexError(msg)
    inside = (index >= start) & (index < stop)
    if start == stop:
        x = with_zeros(x, dim)
    return x, torch.where(inside, index - start, 0), inside


def with_zeros(x: Tensor, dim: int) -> Tensor:
    """Return ``x`` with one more row, of zeros, along ``dim``.

    ``torch.cat`` would ignore an empty vector, which would not be on the graph: this rank would miss collectives that
    the other ranks run in a second backward.
    """
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, 1])


@kernel("getitem", "index")
def _item_at(x: Tensor, index: Any) -> Tensor:
    return x[index]


kernel("one_hot")(F.one_hot)


@kernel("gather")
def _gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False, window: Window | None = None) -> Tensor:
    if window is None:
        return torch.gather(x, dim, index, sparse_grad=sparse_grad)
    table, local, inside = within(x, dim, index, window)
    return torch.gather(table, dim, local).masked_fill(~inside, 0)


@kernel("index_select")
def _index_select(x: Tensor, dim: int, index: Tensor, window: Window | None = None) -> Tensor:
    if window is None:
        return torch.index_select(x, dim, index)
    table, local, inside = within(x, dim, index, window)
    shape = [1] * x.ndim
    shape[dim] = -1
    return torch.index_select(table, dim, local).masked_fill(~inside.reshape(shape), 0)


# -- reading by an index -----------------------------------------------------------------------------------------------


@decomposition(Tensor.__getitem__, signature="x, index", op="getitem")
def _getitem(ops: Any, x: Any, index: Any) -> Any:
    """``x[index]``."""
    if is_mask(index) and not index.ndim:
        return _getitem(ops, ops.unsqueeze(x, 0), index.reshape(1))
    normal, advanced = normal_index(ops, x, index, "__getitem__")
    return dispatch(ops, "index" if advanced else "getitem", x, normal)


@decomposition(aten.index.Tensor, signature="x, indices", op="index")
def _index(ops: Any, x: Any, indices: Any) -> Any:
    return _getitem(ops, x, tuple(slice(None) if index is None else index for index in indices))


@decomposition("masked_select", aten.masked_select.default, signature="x, mask")
def _masked_select(_ops: Any, x: Any, mask: Any) -> Any:
    """The elements where ``mask`` is true, in one dim."""
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    if not shape:
        return x.reshape(1)[mask.reshape(1)]
    return x.expand(shape)[mask.expand(shape)]


@decomposition(torch.combinations, signature="x, r=2, with_replacement=False")
def _combinations(ops: Any, x: Any, r: int, with_replacement: bool) -> Any:
    """Rows of ``r`` elements of ``x``; which elements form a row depends only on the size of ``x``."""
    if x.ndim != 1:
        msg = f"combinations: expected a vector, x has {x.ndim} dims"
        raise LayoutError(msg)
    places = torch.combinations(torch.arange(x.shape[0], device=x.device), r, with_replacement)
    return x[_replicated(ops, places, x._layout)]


# -- value-dependent sizes ---------------------------------------------------------------------------------------------


@decomposition("nonzero", signature="x, *, as_tuple=False")
@decomposition("argwhere", aten.nonzero.default, signature="x", op="nonzero")
def _nonzero(ops: Any, x: Any, as_tuple: bool = False) -> Any:
    """The indices of elements that are not zero; ``x`` is gathered."""
    layout = x._layout
    values = gathered(x, "nonzero")
    if as_tuple:
        return tuple(_replicated(ops, index, layout) for index in torch.nonzero(values, as_tuple=True))
    return _replicated(ops, torch.nonzero(values), layout)


@decomposition(
    torch.where,
    signature="condition, x=None, y=None",
    unless=("where", lambda arguments: arguments["x"] is None or arguments["y"] is None),
)
def _where(ops: Any, condition: Any, x: Any = None, y: Any = None) -> Any:
    """Elements of ``x`` or ``y``; without them, the indices where ``condition`` is true."""
    if x is None and y is None:
        return _nonzero(ops, condition, as_tuple=True)
    return ops.where(condition, x, y)


@decomposition(F.one_hot, signature="x, num_classes=-1")
def _one_hot(ops: Any, x: Any, num_classes: int = -1) -> Any:
    """One-hot encode ``x``; without ``num_classes``, the largest class is read from the gathered ``x``."""
    if num_classes == -1:
        num_classes = int(gathered(x, "one_hot").max()) + 1
    return ops.one_hot(x, num_classes)


@decomposition(aten._local_scalar_dense.default, signature="x", op="item")
def _item(_ops: Any, x: Any) -> Any:
    """The only element as a Python number."""
    return x.item()


@decomposition("equal", aten.equal.default, signature="x, y")
def _equal(_ops: Any, x: Any, y: Any) -> bool:
    """Whether shapes and all values are equal, on every rank."""
    return tuple(x.shape) == tuple(y.shape) and bool((x == y).all())


@decomposition("allclose", signature="x, y, rtol=1e-05, atol=1e-08, equal_nan=False")
def _allclose(_ops: Any, x: Any, y: Any, rtol: float, atol: float, equal_nan: bool) -> bool:
    """Whether all values are close, on every rank."""
    close = (x - y).abs() <= atol + rtol * y.abs()
    same = (x == y) | ((x != x) & (y != y)) if equal_nan else x == y  # noqa: PLR0124 - only NaN differs from itself
    return bool((close | same).all())


# -- indices -----------------------------------------------------------------------------------------------------------


def dispatch(ops: Any, op: str, *args: Any, in_place: bool = False) -> Any:
    """Dispatch canonical operator ``op``."""
    return ops.platform.dispatcher.dispatch(plain_entry(op, in_place=in_place), args, {})


@cache
def plain_entry(op: str, *, in_place: bool) -> OpEntry:
    """The entry of canonical operator ``op`` of the index and scatter families."""
    rule = find_rule(op)
    assert rule is not None
    return OpEntry(op, local_op(op), binder(rule.signature), rule, local_op(op), in_place=in_place)


def normal_index(ops: Any, x: Any, index: Any, op: str) -> tuple[Any, bool]:
    """Return the index with lists and masks turned into integer tensors, and whether it has tensors at all.

    Raises:
        MixedTensorError: a mask is a plain tensor.
        LayoutError: a mask without dims is one of several indices.
    """
    if type(index) is slice:
        return _slice_of_numbers(index), False
    if type(index) is int or index is None or index is Ellipsis:
        return index, False
    items = tuple(map(_slice_of_numbers, index if isinstance(index, tuple) else (index,)))
    if not any(isinstance(item, (Tensor, list, bool)) or hasattr(item, "__array__") for item in items):
        return items, False
    layout = next(operand for operand in (x, *items) if isinstance(operand, DTensor))._layout
    normal: list[Any] = []
    for item in items:
        if isinstance(item, list) or (hasattr(item, "__array__") and not isinstance(item, Tensor)):
            item = _replicated(ops, torch.as_tensor(item), layout)  # noqa: PLW2901
        elif not isinstance(item, DTensor) and getattr(item, "dtype", None) in _MASK_DTYPES and item.ndim:
            msg = f"{op}: the mask is a plain tensor {list(item.shape)}; make it a DTensor first"
            raise MixedTensorError(msg)
        if getattr(item, "dtype", None) in _MASK_DTYPES and not item.ndim:
            msg = f"{op}: a mask without dims must be the only index, and a DTensor"
            raise LayoutError(msg)
        if is_mask(item):
            indices = torch.nonzero(gathered(item, op), as_tuple=True)
            normal.extend(_replicated(ops, index, layout) for index in indices)
        else:
            normal.append(item)
    return tuple(normal), True


def gathered(x: Any, op: str) -> Tensor:
    """The complete values of ``x``, as a plain tensor, outside of autograd."""
    layout = x._layout
    layout.mesh.own_coordinate()  # outside of the mesh there are no values
    target = Layout.of(layout.mesh, ((),) * layout.ndim, (), layout.shape)
    whole: Tensor = x.detach().redistribute_to(target, Cause(op, "x", implicit=True))._local
    return whole


def _replicated(ops: Any, plain: Tensor, layout: Layout) -> Any:
    return ops.platform.wrap(plain, Layout.of(layout.mesh, ((),) * plain.ndim, (), tuple(plain.shape)))


_MASK_DTYPES = (torch.bool, torch.uint8)


def is_mask(item: Any) -> bool:
    """Whether an index is a DTensor of booleans."""
    return isinstance(item, DTensor) and getattr(item, "dtype", None) in _MASK_DTYPES


def _slice_of_numbers(item: Any) -> Any:
    """Return a slice with numbers as bounds; a tensor as a bound would enter the cache key by its identity."""
    if type(item) is not slice:
        return item
    bounds = (item.start, item.stop, item.step)
    return slice(*(None if bound is None else operator.index(bound) for bound in bounds))

"""PyTorch's names for indexing, and the functions whose result's size depends on values.

Those look at the whole of what decides the size (a mask, class numbers), which is gathered; then an operator with
known sizes runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import Decomposition, find_rule
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.torch.op_line import Line, both, method

__all__ = ["FUNCTIONS", "LOCAL", "by_value", "overloads_by_value"]

aten = torch.ops.aten

FUNCTIONS = [
    both("gather"),
    both("index_select"),
    Line("take_along_dim", (torch.take_along_dim, Tensor.take_along_dim)),
    both("scatter"),
    both("scatter_add"),
    both("index_add"),
    method("scatter", "scatter_", in_place=True),
    method("scatter_add", "scatter_add_", in_place=True),
    method("index_add", "index_add_", in_place=True),
]


# First and last index that are held here, and the size of the whole dim.
Window = tuple[int, int, int]


def _found(x: Tensor, dim: int, index: Tensor, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """The table, indices into it, and where they mean something; an empty table gets one row of zeros."""
    start, stop, size = window
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        msg = f"index out of range: indices are {int(index.min())} to {int(index.max())}, the dim has size {size}"
        raise IndexError(msg)
    inside = (index >= start) & (index < stop)
    if start == stop:
        shape = list(x.shape)
        shape[dim] = 1
        x = torch.cat([x, x.new_zeros(shape)], dim)
    return x, torch.where(inside, index - start, 0), inside


def _gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False, window: Window | None = None) -> Tensor:
    if window is None:
        return torch.gather(x, dim, index, sparse_grad=sparse_grad)
    table, local, inside = _found(x, dim, index, window)
    return torch.gather(table, dim, local).masked_fill(~inside, 0)


def _index_select(x: Tensor, dim: int, index: Tensor, window: Window | None = None) -> Tensor:
    if window is None:
        return torch.index_select(x, dim, index)
    table, local, inside = _found(x, dim, index, window)
    shape = [1] * x.ndim
    shape[dim] = -1
    return torch.index_select(table, dim, local).masked_fill(~inside.reshape(shape), 0)


def embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    window: Window | None = None,
) -> Tensor:
    """``F.embedding``, or what the rows ``window`` of a larger table contribute to it."""
    if window is None:
        return F.embedding(x, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    table, local, inside = _found(weight, 0, x, window)
    return F.embedding(local, table, _padding(padding_idx, window)).masked_fill(~inside[..., None], 0)


def _lookup(weight: Tensor, x: Tensor, padding_idx: int | None = -1, **rest: Any) -> Tensor:
    return embedding(x, weight, None if padding_idx is None or padding_idx < 0 else padding_idx, **rest)


def _padding(padding_idx: int | None, window: Window) -> int | None:
    start, stop, _ = window
    return padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None


LOCAL: dict[str, Callable[..., Any]] = {
    "getitem": Tensor.__getitem__,
    "index": Tensor.__getitem__,
    "setitem": Tensor.__setitem__,
    "gather": _gather,
    "index_select": _index_select,
    "scatter": lambda x, dim, index, src=None, value=None, reduce=None: torch.scatter(
        x, dim, index, value if src is None else src, **({} if reduce is None else {"reduce": reduce})
    ),
    "index_put": torch.index_put,
    "scatter_add": torch.scatter_add,
    "index_add": lambda x, dim, index, source, alpha=1: torch.index_add(x, dim, index, source, alpha=alpha),
    "one_hot": F.one_hot,
    "embedding": embedding,
    "lookup": _lookup,
}


@cache
def _entry(op: str, *, in_place: bool = False) -> OpEntry:
    rule = find_rule(op)
    assert rule is not None  # noqa: S101 - op is one of this file's
    return OpEntry(op, LOCAL[op], binder(rule.signature), rule, LOCAL[op], in_place=in_place)


def _dispatch(ops: Any, op: str, *args: Any, in_place: bool = False) -> Any:
    return ops.platform.dispatcher.dispatch(_entry(op, in_place=in_place), args, {})


def getitem(ops: Any, x: Any, index: Any) -> Any:
    """``x[index]``."""
    if _is_mask(index) and not index.ndim:
        return getitem(ops, ops.unsqueeze(x, 0), index.reshape(1))
    found, advanced = _index(ops, x, index, "__getitem__")
    return _dispatch(ops, "index" if advanced else "getitem", x, found)


def setitem(ops: Any, x: Any, index: Any, value: Any) -> None:
    """``x[index] = value``; one mask and a number write element by element, wherever these are."""
    if _is_mask(index) and isinstance(value, (int, float)):
        x.masked_fill_(index.reshape(*index.shape, *(1,) * (x.ndim - index.ndim)), value)
        return
    found, _ = _index(ops, x, index, "__setitem__")
    _dispatch(ops, "setitem", x, found, value, in_place=True)


def index_put(ops: Any, x: Any, indices: Any, values: Any, accumulate: bool) -> Any:
    """A copy of ``x`` with ``values`` put, or added, at ``indices``."""
    return _dispatch(ops, "index_put", x, _places(ops, x, indices, values), values, accumulate)


def index_put_(ops: Any, x: Any, indices: Any, values: Any, accumulate: bool) -> Any:
    """The same in place."""
    return x.copy_(index_put(ops, x, indices, values, accumulate))


def _places(ops: Any, x: Any, indices: Any, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, DTensor):
        msg = f"index_put: values must be a DTensor, got a plain tensor {list(values.shape)}"
        raise MixedTensorError(msg)
    found, _ = _index(ops, x, tuple(slice(None) if one is None else one for one in indices), "index_put")
    return tuple(None if isinstance(one, slice) else one for one in found)


def masked_select(_ops: Any, x: Any, mask: Any) -> Any:
    """Where ``mask`` is true, in one dim."""
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    if not shape:
        return x.reshape(1)[mask.reshape(1)]
    return x.expand(shape)[mask.expand(shape)]


def nonzero(ops: Any, x: Any, as_tuple: bool = False) -> Any:
    """Indices of what is not zero; the whole is gathered."""
    layout = x._layout
    found = _whole(x, "nonzero")
    if as_tuple:
        return tuple(_replicated(ops, one, layout) for one in torch.nonzero(found, as_tuple=True))
    return _replicated(ops, torch.nonzero(found), layout)


def where(ops: Any, condition: Any, x: Any = None, y: Any = None) -> Any:
    """``torch.where``: elements of ``x`` or ``y``; without them the places where ``condition`` holds."""
    if x is None and y is None:
        return nonzero(ops, condition, as_tuple=True)
    return ops.where(condition, x, y)


def one_hot(ops: Any, x: Any, num_classes: int = -1) -> Any:
    """One dim more; without ``num_classes`` the largest class is looked for in the whole."""
    if num_classes == -1:
        num_classes = int(_whole(x, "one_hot").max()) + 1
    return _dispatch(ops, "one_hot", x, num_classes)


def item(_ops: Any, x: Any) -> Any:
    """The one element as a Python number."""
    return x.item()


def combinations(ops: Any, x: Any, r: int, with_replacement: bool) -> Any:
    """Rows of ``r`` elements, whose places follow from the size."""
    if x.ndim != 1:
        msg = f"combinations: expected a vector, x has {x.ndim} dims"
        raise LayoutError(msg)
    places = torch.combinations(torch.arange(x.shape[0], device=x.device), r, with_replacement)
    return x[_replicated(ops, places, x._layout)]


def equal(_ops: Any, x: Any, y: Any) -> bool:
    """Whether shapes and all values are equal, on every rank."""
    return tuple(x.shape) == tuple(y.shape) and bool((x == y).all())


def allclose(_ops: Any, x: Any, y: Any, rtol: float, atol: float, equal_nan: bool) -> bool:
    """Whether all values are close, on every rank."""
    close = (x - y).abs() <= atol + rtol * y.abs()
    same = (x == y) | ((x != x) & (y != y)) if equal_nan else x == y  # noqa: PLR0124 - only NaN differs from itself
    return bool((close | same).all())


def _whole(x: Any, op: str) -> Tensor:
    layout = x._layout
    target = Layout.of(layout.mesh, ((),) * layout.ndim, (), layout.shape)
    return x.detach().redistribute_to(target, Cause(op, "x", implicit=True))._local


def _replicated(ops: Any, plain: Tensor, layout: Layout) -> Any:
    return ops.platform.wrap(plain, Layout.of(layout.mesh, ((),) * plain.ndim, (), tuple(plain.shape)))


def _is_mask(item: Any) -> bool:
    return isinstance(item, DTensor) and getattr(item, "dtype", None) in _TRUTHS


_TRUTHS = (torch.bool, torch.uint8)


def _numbers(item: Any) -> Any:
    """A slice with its bounds as numbers: the cache must not know a tensor in their place by its identity."""
    if type(item) is not slice:
        return item
    return slice(*(None if one is None else operator.index(one) for one in (item.start, item.stop, item.step)))


def _index(ops: Any, x: Any, index: Any, op: str) -> tuple[Any, bool]:
    """The index with lists and masks turned into integer tensors, and whether it has tensors at all."""
    if type(index) is slice:
        return _numbers(index), False
    if type(index) is int or index is None or index is Ellipsis:
        return index, False
    items = tuple(map(_numbers, index if isinstance(index, tuple) else (index,)))
    if not any(isinstance(item, (Tensor, list, bool)) or hasattr(item, "__array__") for item in items):
        return items, False
    layout = next(one for one in (x, *items) if isinstance(one, DTensor))._layout
    found: list[Any] = []
    for item in items:
        if isinstance(item, list) or (hasattr(item, "__array__") and not isinstance(item, Tensor)):
            item = _replicated(ops, torch.as_tensor(item), layout)  # noqa: PLW2901
        elif not isinstance(item, DTensor) and getattr(item, "dtype", None) in _TRUTHS and item.ndim:
            msg = f"{op}: the mask is a plain tensor {list(item.shape)}; make it a DTensor first"
            raise MixedTensorError(msg)
        if getattr(item, "dtype", None) in _TRUTHS and not item.ndim:
            msg = f"{op}: a mask without dims is supported as the only index, as a DTensor"
            raise LayoutError(msg)
        if _is_mask(item):
            parts = torch.nonzero(_whole(item, op), as_tuple=True)
            found.extend(_replicated(ops, part, layout) for part in parts)
        else:
            found.append(item)
    return tuple(found), True


def _composed(lines: dict[Any, tuple[Callable[..., Any], str]]) -> dict[Any, OpEntry]:
    """Entries of functions that are what a composition makes of their arguments."""
    return {
        func: OpEntry(run.__name__, func, binder(signature), Decomposition(run.__name__, signature, run), func)
        for func, (run, signature) in lines.items()
    }


PUT = "x, indices, values, accumulate=False"


@cache
def overloads_by_value() -> dict[Any, OpEntry]:
    """The same for operator overloads."""
    lines: dict[Any, tuple[Callable[..., Any], str]] = {
        aten.index.Tensor: (_index_list, "x, indices"),
        aten.index_put.default: (index_put, PUT),
        aten.index_put_.default: (index_put_, PUT),
        aten.equal.default: (equal, "x, y"),
        aten.masked_select.default: (masked_select, "x, mask"),
        aten.nonzero.default: (nonzero, "x"),
        aten._local_scalar_dense.default: (item, "x"),  # noqa: SLF001 - an operator's name
        aten._linalg_check_errors.default: (check_errors, "x, api_name, *, is_matrix"),  # noqa: SLF001
    }
    return _composed(lines)


def check_errors(_ops: Any, x: Any, api_name: str, is_matrix: bool) -> None:
    """Raise, on every rank, what linear algebra reports about any of its matrices."""
    aten._linalg_check_errors(_whole(x, api_name), api_name, is_matrix=is_matrix)  # noqa: SLF001 - an operator's name


def _index_list(ops: Any, x: Any, indices: Any) -> Any:
    return getitem(ops, x, tuple(slice(None) if one is None else one for one in indices))


@cache
def by_value() -> dict[Any, OpEntry]:
    """Entries of the functions for which layouts do not say enough."""
    lines: dict[Any, tuple[Callable[..., Any], str]] = {
        Tensor.__getitem__: (getitem, "x, index"),
        Tensor.__setitem__: (setitem, "x, index, value"),
        torch.masked_select: (masked_select, "x, mask"),
        Tensor.masked_select: (masked_select, "x, mask"),
        torch.nonzero: (nonzero, "x, *, as_tuple=False"),
        Tensor.nonzero: (nonzero, "x, *, as_tuple=False"),
        torch.argwhere: (nonzero, "x"),
        Tensor.argwhere: (nonzero, "x"),
        torch.index_put: (index_put, PUT),
        Tensor.index_put: (index_put, PUT),
        torch.where: (where, "condition, x=None, y=None"),
        F.one_hot: (one_hot, "x, num_classes=-1"),
        torch.combinations: (combinations, "x, r=2, with_replacement=False"),
        torch.equal: (equal, "x, y"),
        Tensor.equal: (equal, "x, y"),
        torch.allclose: (allclose, "x, y, rtol=1e-05, atol=1e-08, equal_nan=False"),
        Tensor.allclose: (allclose, "x, y, rtol=1e-05, atol=1e-08, equal_nan=False"),
    }
    return _composed(lines)

"""PyTorch's writes to parts of tensors, at an index or along dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import MixedTensorError
from hyper_parallel.platform.torch.ops.index import dispatch, is_mask, normal_index
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

spelling("scatter", "scatter", Tensor.scatter_, aten.scatter.src, aten.scatter.value)
spelling("scatter_add", "scatter_add", Tensor.scatter_add_, aten.scatter_add.default)
spelling("scatter_reduce", "scatter_reduce", aten.scatter_reduce.two, copies_back=True)
spelling("index_add", "index_add", Tensor.index_add_, aten.index_add.default)
spelling("index_copy", "index_copy", aten.index_copy.default, copies_back=True)
spelling("index_fill", "index_fill", aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, copies_back=True)
spelling("index_reduce", copies_back=True)
spelling("put", "put", aten.put.default, copies_back=True)
spelling("masked_scatter", "masked_scatter", aten.masked_scatter.default, copies_back=True)
spelling("select_scatter", "select_scatter", aten.select_scatter.default)
spelling("slice_scatter", "slice_scatter", aten.slice_scatter.default)
spelling("diagonal_scatter", "diagonal_scatter", aten.diagonal_scatter.default)
spelling("as_strided_scatter")


@kernel("setitem")
def _write_at(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


@kernel("index_put")
def _put(x: Tensor, indices: Any, values: Tensor, accumulate: bool) -> Tensor:
    return aten.index_put.default(x, indices, values, accumulate)  # torch.index_put rejects None


@kernel("scatter")
def _scatter(x: Tensor, dim: int, index: Tensor, src: Any = None, value: Any = None, reduce: Any = None) -> Tensor:
    options = {} if reduce is None else {"reduce": reduce}
    return torch.scatter(x, dim, index, value if src is None else src, **options)


@kernel("index_add")
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1) -> Tensor:
    return torch.index_add(x, dim, index, source, alpha=alpha)


@decomposition(Tensor.__setitem__, signature="x, index, value", op="setitem")
def _setitem(ops: Any, x: Any, index: Any, value: Any) -> None:
    """``x[index] = value``; a number is written where a mask is true without computing positions."""
    if is_mask(index) and isinstance(value, (int, float)):
        x.masked_fill_(index.reshape(*index.shape, *(1,) * (x.ndim - index.ndim)), value)
        return
    normal, _ = normal_index(ops, x, index, "__setitem__")
    dispatch(ops, "setitem", x, normal, value, in_place=True)


@decomposition("index_put", aten.index_put.default, signature="x, indices, values, accumulate=False", copies_back=True)
def _index_put(ops: Any, x: Any, indices: Any, values: Any, accumulate: bool) -> Any:
    """A copy of ``x`` with ``values`` put, or added, at ``indices``."""
    if not isinstance(values, DTensor):
        msg = f"index_put: values must be a DTensor, got a plain tensor {list(values.shape)}"
        raise MixedTensorError(msg)
    normal, _ = normal_index(ops, x, tuple(slice(None) if index is None else index for index in indices), "index_put")
    places = tuple(None if isinstance(index, slice) else index for index in normal)
    return dispatch(ops, "index_put", x, places, values, accumulate)


@decomposition(aten.index_put_.default, signature="x, indices, values, accumulate=False", op="index_put_")
def _index_put_in_place(ops: Any, x: Any, indices: Any, values: Any, accumulate: bool) -> Any:
    return x.copy_(_index_put(ops, x, indices, values, accumulate))

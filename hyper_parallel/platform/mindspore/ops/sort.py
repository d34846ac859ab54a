"""Sorting of MindSpore; indices are found on the host, since its CPU kernels for them are few."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops as native

from hyper_parallel.platform.mindspore.ops.registry import (
    METHOD,
    computes_on_cpu,
    decomposition,
    kernel,
    replicated,
    spellings,
)

__all__: list[str] = []

spellings("SortExt sort  ArgSort argsort  TopkExt topk  Kthvalue kthvalue")

# -- kernels -----------------------------------------------------------------------------------------------------------


def _order(x: Tensor, dim: int, *, descending: bool) -> Tensor:
    """Indices in order, found on the host; equal elements keep theirs, and NaN is the greatest."""
    values = x.asnumpy()
    if not x.ndim:
        return Tensor(np.zeros((), np.int64))
    if not descending:
        return Tensor(np.argsort(values, axis=dim, kind="stable").astype(np.int64))
    back = np.argsort(np.flip(values, dim), axis=dim, kind="stable")
    return Tensor((values.shape[dim] - 1 - np.flip(back, dim)).astype(np.int64))


@kernel("sort")
def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    del stable  # always
    indices = _order(x, dim, descending=descending)
    return (mint.gather(x, dim, indices) if x.ndim else x * 1), indices


kernel("argsort")(
    lambda x, dim=-1, descending=False, stable=False: _order(x, dim, descending=descending)  # noqa: ARG005 - canonical
)


@kernel("topk")
def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:  # noqa: A002
    del sorted  # always
    indices = mint.narrow(_order(x, dim, descending=largest), dim, 0, k)
    return mint.gather(x, dim, indices), indices


@kernel("kthvalue")
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    indices = mint.narrow(_order(x, dim, descending=False), dim, k - 1, 1)
    values = mint.gather(x, dim, indices)
    if keepdim:
        return values, indices
    shape = tuple(size for axis, size in enumerate(x.shape) if axis != dim % x.ndim)
    return values.reshape(shape), indices.reshape(shape)


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Sort")
def _legacy_sort(ops: Any, primitive: Any, x: Any) -> Any:
    """The indices are 32-bit numbers."""
    values, indices = ops.sort(x, primitive.init_attrs["axis"], primitive.init_attrs["descending"])
    return values, ops.cast(indices, dtype=mindspore.int32)


@decomposition("TopK")
def _legacy_topk(ops: Any, _: Any, x: Any, k: int) -> Any:
    """Along the last dim; the indices are 32-bit numbers."""
    values, indices = ops.topk(x, k)
    return values, ops.cast(indices, dtype=mindspore.int32)


@decomposition("DeprecatedSort")
def _sort_along(ops: Any, _: Any, x: Any, axis: int = -1, descending: bool = False) -> Any:
    values, indices = ops.sort(x, axis, descending)
    return values, ops.cast(indices, dtype=mindspore.int32)


@decomposition("DeprecatedArgsort")
def _argsort_along(ops: Any, _: Any, x: Any, axis: int = -1, descending: bool = False) -> Any:
    return ops.cast(ops.argsort(x, axis, descending), dtype=mindspore.int32)


def _index_dtype() -> Any:
    """The dtype of a method's indices: on CPU 32-bit numbers."""
    return mindspore.int32 if computes_on_cpu() else mindspore.int64


@decomposition(METHOD + "SortExt")
def _method_sort(ops: Any, _: Any, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    values, indices = ops.sort(x, dim, descending, stable)
    return values, ops.cast(indices, dtype=_index_dtype())


@decomposition(METHOD + "ArgSort")
def _method_argsort(ops: Any, _: Any, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    return ops.cast(ops.argsort(x, dim, descending, stable), dtype=_index_dtype())


@decomposition(METHOD + "TopkExt")
def _method_topk(ops: Any, _: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002 - MindSpore's name
    values, indices = ops.topk(x, k, dim, largest, sorted)
    return values, ops.cast(indices, dtype=_index_dtype())


@decomposition("Unique")
def _unique(_ops: Any, _: Any, x: Any) -> Any:
    """Values in the order of their first appearance, and where each element is among them; ``x`` is gathered.

    MindSpore has no gradient of it on CPU. Its kernel returns values of an earlier call for a tensor without elements.
    """
    whole = x.full_tensor()
    if whole.size:
        values, places = native.unique(whole)
    else:
        dtype = whole.dtype if whole.dtype == mindspore.int64 else mindspore.int32
        values, places = whole.reshape(-1), Tensor(np.zeros(whole.shape), dtype)
    return replicated(values, x), replicated(places, x)

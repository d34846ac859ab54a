"""Functions of ``mindspore.numpy`` that mix a tensor with constants or masks of its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, numpy as functions

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.mindspore.ops.kernels import promoted
from hyper_parallel.platform.mindspore.ops.python_api import replacement
from hyper_parallel.platform.mindspore.ops.registry import expect, replicated

__all__: list[str] = []


def _cast(ops: Any, x: Any, dtype: Any) -> Any:
    return x if dtype is None else ops.cast(x, dtype=dtype)


_OF_NUMBERS = {bool: mindspore.bool_, int: mindspore.int32, float: mindspore.float32}


def _of_two(name: str) -> None:
    def run(ops: Any, x: Any, y: Any, dtype: Any = None) -> Any:
        if isinstance(x, DTensor) and type(y) in _OF_NUMBERS:
            y = replicated(Tensor(y, _OF_NUMBERS[type(y)]), x)
            x = ops.cast(x, dtype=promoted(x, y))
        return _cast(ops, getattr(ops, name)(x, y), dtype)

    replacement(name, functions)(run)


def _of_one(name: str) -> None:
    def run(ops: Any, x: Any) -> Any:
        return getattr(ops, name)(x)

    replacement(name, functions)(run)


def _extreme(name: str) -> None:
    def run(ops: Any, x: Any, y: Any, dtype: Any = None) -> Any:
        if isinstance(x, DTensor) and type(y) in _OF_NUMBERS:  # the tensor determines the dtype
            y = replicated(Tensor(y, x.dtype), x)
            if x.dtype == mindspore.bool_:  # not supported by the kernels
                numbers = (ops.cast(each, dtype=mindspore.int32) for each in (x, y))
                return ops.cast(getattr(ops, name)(*numbers), dtype=dtype or x.dtype)
        chosen = getattr(ops, name)(x, y)
        if isinstance(x, DTensor):  # MindSpore's kernel drops a NaN of the first operand
            chosen = ops.where(ops.ne(x, x), x, chosen)
        return _cast(ops, chosen, dtype)

    replacement(name, functions)(run)


_of_two("fmod")
for _name in ("maximum", "minimum"):
    _extreme(_name)
for _name in ("isinf", "isnan", "isfinite"):
    _of_one(_name)


@replacement("sign", functions)
def _sign(ops: Any, x: Any, dtype: Any = None) -> Any:
    return _cast(
        ops, ops.sign(x if x.is_floating_point() or x.is_complex() else ops.cast(x, dtype=mindspore.float32)), dtype
    )


@replacement("clip", functions)
def _clip(ops: Any, x: Any, xmin: Any, xmax: Any, dtype: Any = None) -> Any:
    if x.dtype != mindspore.bool_:
        return _cast(ops, ops.clamp(x, xmin, xmax), dtype)
    clipped = x if xmin is None else ops.maximum(x, xmin)
    return _cast(ops, clipped if xmax is None else ops.minimum(clipped, xmax), dtype or x.dtype)


@replacement("nansum", functions)
def _nansum(ops: Any, a: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
    return ops.nansum(a, axis, keepdims, dtype=dtype or a.dtype)


def _triangle(name: str) -> Callable[..., Any]:
    def run(ops: Any, m: Any, k: int = 0) -> Any:
        return getattr(ops, name)(m, k)

    return run


replacement("tril", functions)(_triangle("tril"))
replacement("triu", functions)(_triangle("triu"))


@replacement("diag", functions)
def _diag(ops: Any, v: Any, k: int = 0) -> Any:
    return ops.diag(v, k)


@replacement("flip", functions)
def _flip(ops: Any, m: Any, axis: Any = None) -> Any:
    dims = range(len(m.shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
    return ops.flip(m, tuple(dims))


@replacement("take", functions)
def _take(ops: Any, a: Any, indices: Any, axis: int | None = None, mode: str = "clip") -> Any:
    """Return elements along ``axis``; positions out of range are clipped."""
    expect("numpy.take", "mode", mode, "clip")
    x, axis = (ops.view(a, (-1,)), 0) if axis is None else (a, axis % len(a.shape))
    index = indices if isinstance(indices, DTensor) else replicated(Tensor(indices), a)
    return ops.index(x, (*(slice(None),) * axis, ops.clamp(index, 0, x.shape[axis] - 1)))


def _constant(name: str) -> None:
    def run(ops: Any, a: Any, *values: Any, dtype: Any = None, shape: Any = None) -> Any:
        expect(f"numpy.{name}", "shape", shape, None)
        return getattr(ops, name)(a, *values, dtype=dtype or a.dtype)

    replacement(name, functions)(run)


for _name in ("zeros_like", "ones_like", "full_like"):
    _constant(_name)

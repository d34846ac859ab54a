"""CPU implementations of MindSpore functions whose kernels exist only on Ascend devices, or are wrong on the CPU.

They are called for plain tensors; DTensors use the library's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.platform.mindspore.ops.kernels import write_over
from hyper_parallel.platform.select import get_platform

__all__ = ["FUNCTIONS", "METHODS", "to_empty"]


def _arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Any:
    numbers = Tensor(np.arange(start) if end is None else np.arange(start, end, step))
    return numbers if dtype is None else numbers.astype(dtype)


def _argsort(x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    return _sort(x, dim=dim, descending=descending, stable=stable)[1]


def _cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    if dtype is None and x.dtype not in (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16):
        dtype = mindspore.int64
    return ops.cumsum(x if dtype is None else x.astype(dtype), dim)


def _floor_divide(x: Any, other: Any) -> Any:
    return ops.floor_div(x, other)


def _full(size: Sequence[int], fill_value: Any, *, dtype: Any = None) -> Any:
    return ops.full(tuple(size), fill_value, dtype=dtype)


def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:  # noqa: A002 - MindSpore's names
    values = x.asnumpy()
    ends = (values.min(), values.max()) if min == max == 0 and values.size else (min, max)
    return Tensor(np.histogram(values, bins, ends)[0].astype(values.dtype))


def _index_select(x: Any, dim: int, index: Any) -> Any:
    return ops.gather(x, index, dim)


def _norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = x if dtype is None else x.astype(dtype)
    if p not in (2, "fro"):
        return ops.norm(x, p, dim, keepdim)
    return mint.sqrt(mint.sum(x * x, dim, keepdim))


def _like(make: Callable[..., Any]) -> Callable[..., Any]:
    def filled(x: Any, *, dtype: Any = None) -> Any:
        return make(tuple(x.shape), dtype=dtype or x.dtype)

    return filled


def _outer(a: Any, b: Any) -> Any:
    return a.reshape(-1, 1) * b.reshape(1, -1)


def _repeat_interleave(x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
    del output_size
    if dim is None:
        x, dim = x.reshape(-1), 0
    counts = repeats.asnumpy() if isinstance(repeats, Tensor) else repeats
    return ops.gather(x, Tensor(np.repeat(np.arange(x.shape[dim]), counts)), dim)


def _roll(x: Any, shifts: Any, dims: Any = None) -> Any:
    places = np.roll(np.arange(x.numel()).reshape(tuple(x.shape)), shifts, dims)
    return ops.gather(x.reshape(-1), Tensor(places.reshape(-1)), 0).reshape(x.shape)


def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    return ops.tensor_scatter_elements(x, index, src, dim, "add")


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    small = mint.log1p(mint.exp(mint.minimum(scaled, Tensor(threshold, x.dtype)))) / beta
    return mint.where(scaled > threshold, x, small)


def _sort(x: Any, *, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Any, Any]:
    del stable  # the sort below is always stable
    values = x.asnumpy()
    order = np.argsort(-values if descending else values, dim, kind="stable")
    index = Tensor(order.astype(np.int64))
    return mint.gather(x, dim % x.ndim, index), index


def _split(x: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
    size, sections = x.shape[dim], split_size_or_sections
    if isinstance(sections, int):
        sections = [min(sections, size - start) for start in range(0, size, sections)]
    starts = np.cumsum([0, *sections[:-1]])
    return tuple(mint.narrow(x, dim % x.ndim, int(start), n) for start, n in zip(starts, sections, strict=True))


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return mint.cat([mint.unsqueeze(each, dim) for each in tensors], dim)


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:  # noqa: A002 - MindSpore's names
    del sorted
    index = mint.narrow(_sort(x, dim=dim, descending=largest)[1], dim % x.ndim, 0, k)
    return mint.gather(x, dim % x.ndim, index), index


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "addcmul": lambda x, a, b, *, value=1: x + a * b * value,
    "arange": _arange,
    "argsort": _argsort,
    "cumsum": _cumsum,
    "floor_divide": _floor_divide,
    "full": _full,
    "histc": _histc,
    "index_select": _index_select,
    "nn.functional.softplus": _softplus,
    "norm": _norm,
    "ones_like": _like(mint.ones),
    "outer": _outer,
    "repeat_interleave": _repeat_interleave,
    "roll": _roll,
    "scatter_add": _scatter_add,
    "sort": _sort,
    "split": _split,
    "stack": _stack,
    "topk": _topk,
    "tril": ops.tril,
    "triu": ops.triu,
    "zeros_like": _like(mint.zeros),
}
"""Functions of ``mindspore.mint`` by name."""


def _normal(x: Any, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
    return mean + std * ops.standard_normal(tuple(x.shape))


def _scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
    values = src if isinstance(src, Tensor) else ops.full(tuple(index.shape), src, dtype=x.dtype)
    return mint.scatter(x, dim, index, values)


METHODS: dict[str, Callable[..., Any]] = {
    "add_": lambda x, y, *, alpha=1: x + y * alpha,
    "div_": lambda x, y: x / y,
    "fill_": lambda x, value: ops.full(tuple(x.shape), value, dtype=x.dtype),
    "index_add_": lambda x, dim, index, source: ops.index_add(x, index.astype(mindspore.int32), source, dim),
    "mul_": lambda x, y: x * y,
    "normal_": _normal,
    "scatter_": _scatter,
    "sub_": lambda x, y, *, alpha=1: x - y * alpha,
    "zero_": lambda x: mint.zeros(tuple(x.shape), dtype=x.dtype),
}
"""In-place methods by name, each with a function that computes the new value. On the CPU, MindSpore's do not write."""


def written(method: str) -> Callable[..., Any]:
    """Return an in-place method for plain tensors, which writes the value that :data:`METHODS` computes."""
    compute = METHODS[method]

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = compute(self, *args, **kwargs).astype(self.dtype)
        with get_platform().no_grad():  # the written tensor is a leaf or a buffer
            return write_over(self, values)

    return write


def to_empty(self: nn.Cell, *, device: str | None = None, **options: Any) -> Any:
    """Replacement of ``Cell.to_empty`` that uses the CPU if no device is named."""
    return _TO_EMPTY(self, device=device or "CPU", **options)


_TO_EMPTY: Any = getattr(nn.Cell, "to_empty", None)  # 2.10 and newer

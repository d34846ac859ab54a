"""Operators of MindSpore that join tensors, or turn, flip and mask them along dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.ops.dims import unsqueeze
from hyper_parallel.platform.mindspore.ops.registry import decomposition, kernel, number, spellings

__all__: list[str] = []

spellings("Concat cat  StackExt stack  ReverseV2 flip  Roll roll  TrilExt tril  Triu triu  Tril tril")

# -- kernels -----------------------------------------------------------------------------------------------------------

kernel("cat", reliable_on_empty=True)(lambda tensors, dim=0: mint.cat(list(tensors), dim))
kernel("stack")(lambda tensors, dim=0: mint.cat([unsqueeze(tensor, dim) for tensor in tensors], dim))
kernel("flip")(lambda x, dims: mint.flip(x, tuple(dims)))


@kernel("roll")
def _roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None:
        return _roll(x.reshape((-1,)), shifts, 0).reshape(x.shape)
    pairs = [(shifts, dims)] if isinstance(dims, int) else list(zip(shifts, dims, strict=True))
    for shift, dim in pairs:
        size = x.shape[dim]
        cut = -shift % size if size else 0
        if cut:
            x = mint.cat([mint.narrow(x, dim, cut, size - cut), mint.narrow(x, dim, 0, cut)], dim)
    return x


def _triangle(lower: bool) -> Callable[..., Tensor]:
    def compute(x: Tensor, diagonal: int = 0) -> Tensor:
        rows = ops.arange(x.shape[-2]).reshape((-1, 1))
        columns = ops.arange(x.shape[-1]).reshape((1, -1))
        kept = (columns - rows <= diagonal) if lower else (columns - rows >= diagonal)
        return mint.where(kept, x, ops.zeros_like(x))

    return compute


kernel("tril")(_triangle(lower=True))
kernel("triu")(_triangle(lower=False))

# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Stack", "Pack")
def _stack(ops: Any, primitive: Any, tensors: Any, *__: Any) -> Any:
    return ops.stack(list(tensors), primitive.axis)


@decomposition("MatrixBandPart")
def _matrix_band_part(ops: Any, _: Any, x: Any, lower: Any, upper: Any) -> Any:
    """A negative number of diagonals means all."""
    lower, upper = number(lower), number(upper)
    x = x if lower < 0 else ops.triu(x, -lower)
    return x if upper < 0 else ops.tril(x, upper)

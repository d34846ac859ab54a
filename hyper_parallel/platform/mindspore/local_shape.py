"""The matmul family, views, joins and reductions on plain MindSpore tensors, with canonical names and CPU kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.platform.mindspore.einsum import einsum_by
from hyper_parallel.platform.mindspore.empty import nothing, tolerant

__all__ = ["LOCAL", "matmul"]

_plain_linear = tolerant("linear", lambda x, weight, bias: F.linear(x, weight, bias))
_matrices = tolerant("matmul", mint.matmul)
_batches = tolerant("matmul", mint.bmm)
_plus = tolerant("add", mint.add)  # the gradient of what is broadcast sums over no element where the other is empty


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Nothing to contract, but the bias has a gradient; and that of a bias of one element comes in the wrong shape.
    if bias is not None and (x.shape[-1] == 0 or bias.shape != weight.shape[:1]):
        return _plus(_plain_linear(x, weight, None), bias)
    return _plain_linear(x, weight, bias)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Matrix products by kernels of two or three dims: the general one fails in backward on batches of one."""
    if x.ndim == 1:
        return matmul(x.reshape((1, -1)), y).reshape((*y.shape[:-2], *y.shape[-1:] * (y.ndim > 1)))
    if y.ndim == 1:
        return matmul(x, y.reshape((-1, 1))).reshape(x.shape[:-1])
    if x.ndim == 2 and y.ndim == 2:
        return _matrices(x, y)
    if y.ndim == 2:
        rows = x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))
        return _matrices(rows, y).reshape((*x.shape[:-1], y.shape[-1]))
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    left, right = (_one_batch(one, batch) for one in (x, y))
    return _batches(left, right).reshape((*batch, x.shape[-2], y.shape[-1]))


def _one_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    shape = (*batch, *x.shape[-2:])
    if tuple(x.shape) != shape and 0 in batch:
        return nothing((0, *x.shape[-2:]), x)
    wide = x if tuple(x.shape) == shape else mint.broadcast_to(x, shape)
    return wide.reshape((math.prod(batch), *x.shape[-2:]))


def _biased(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = matmul(x, y)
    return _plus(bias if beta == 1 else bias * beta, product if alpha == 1 else product * alpha)


def _summed_batches(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    rows = mint.permute(x, (1, 0, 2)).reshape((x.shape[1], x.shape[0] * x.shape[2]))
    return _biased(bias, rows, y.reshape((y.shape[0] * y.shape[1], y.shape[2])), beta=beta, alpha=alpha)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    first, second = dim1 % x.ndim, dim2 % x.ndim
    rest = [dim for dim in range(x.ndim) if dim not in (first, second)]
    rows, columns = x.shape[first], x.shape[second]
    start, count = (
        (offset, min(rows, columns - offset)) if offset >= 0 else (-offset * columns, min(rows + offset, columns))
    )
    flat = mint.permute(x, (*rest, first, second)).reshape((*(x.shape[dim] for dim in rest), rows * columns))
    return ops.gather(flat, ops.arange(max(count, 0)) * (columns + 1) + start, len(rest))


def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    at = dimension % x.ndim
    starts = ops.arange(0, x.shape[at] - size + 1, step)
    index = (starts.reshape((-1, 1)) + ops.arange(size).reshape((1, -1))).reshape((-1,))
    found = ops.gather(x, index, at).reshape((*x.shape[:at], starts.shape[0], size, *x.shape[at + 1 :]))
    return mint.permute(found, (*(dim for dim in range(found.ndim) if dim != at + 1), at + 1))


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.reshape((-1, 1)) * y.reshape((1, -1))


def _moved(x: Tensor, source: Any, destination: Any) -> Tensor:
    ndim = x.ndim
    sources = [one % ndim for one in ((source,) if isinstance(source, int) else source)]
    targets = [one % ndim for one in ((destination,) if isinstance(destination, int) else destination)]
    rest = iter([dim for dim in range(ndim) if dim not in sources])
    order = [sources[targets.index(dim)] if dim in targets else next(rest) for dim in range(ndim)]
    return mint.permute(x, tuple(order))


def _squeeze(x: Tensor, dim: Any = None) -> Tensor:
    dims = range(x.ndim) if dim is None else [one % x.ndim for one in ((dim,) if isinstance(dim, int) else dim)]
    return x.reshape(tuple(size for index, size in enumerate(x.shape) if index not in dims or size != 1))


def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    at = dim % (x.ndim + 1)
    return x.reshape((*x.shape[:at], 1, *x.shape[at:]))


def _expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    lead = len(shape) - x.ndim
    sizes = tuple(x.shape[index - lead] if size == -1 else size for index, size in enumerate(shape))
    return mint.broadcast_to(x, sizes)


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    at = dim % x.ndim
    found = mint.narrow(x, at, index % x.shape[at], 1)
    return found.reshape((*x.shape[:at], *x.shape[at + 1 :]))


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_select(x, dim, index) for index in range(x.shape[dim]))


def _split(x: Tensor, split_size_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    total = x.shape[dim]
    if isinstance(split_size_or_sections, int):
        step = split_size_or_sections
        sizes = [min(step, total - start) for start in range(0, total, step)] or [0]
    else:
        sizes = list(split_size_or_sections)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(mint.narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=True))


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    return mint.tile(x, tuple(repeats))


def _repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None) -> Tensor:
    del output_size
    if dim is None:
        x, dim = x.reshape((-1,)), 0
    at = dim % x.ndim
    wide = mint.broadcast_to(_unsqueeze(x, at + 1), (*x.shape[: at + 1], repeats, *x.shape[at + 1 :]))
    return wide.reshape((*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :]))


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
    def keep(x: Tensor, diagonal: int = 0) -> Tensor:
        rows = ops.arange(x.shape[-2]).reshape((-1, 1))
        columns = ops.arange(x.shape[-1]).reshape((1, -1))
        kept = (columns - rows <= diagonal) if lower else (columns - rows >= diagonal)
        return mint.where(kept, x, ops.zeros_like(x))

    return keep


LOCAL: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "mv": matmul,
    "dot": lambda x, y: mint.sum(x * y),
    "outer": _outer,
    "addmm": _biased,
    "baddbmm": _biased,
    "addbmm": _summed_batches,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "addmv": _biased,
    "einsum": lambda equation, operands: einsum_by(matmul, equation, operands),
    "view": lambda x, shape: x.reshape(tuple(shape)),
    "transpose": lambda x, dim0, dim1: mint.transpose(x, dim0, dim1),
    "permute": lambda x, dims: mint.permute(x, tuple(dims)),
    "movedim": _moved,
    "t": lambda x: mint.permute(x, tuple(range(x.ndim))[::-1]),
    "reversed_dims": lambda x: mint.permute(x, tuple(range(x.ndim))[::-1]),
    "matrix_transpose": lambda x: mint.transpose(x, -2, -1),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "narrow": lambda x, dim, start, length: mint.narrow(x, dim, start, length),
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    "split": _split,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "cat": lambda tensors, dim=0: mint.cat(list(tensors), dim),
    "stack": lambda tensors, dim=0: mint.cat([_unsqueeze(one, dim) for one in tensors], dim),
    "roll": _roll,
    "flip": lambda x, dims: mint.flip(x, tuple(dims)),
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
}

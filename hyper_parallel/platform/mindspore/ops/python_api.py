"""Functions of MindSpore's Python layer that would mix a DTensor with plain tensors of its global shape.

They are patched (``patches.py``), wherever MindSpore's modules hold them; without a DTensor the originals run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops as functions
from mindspore.ops import tensor_method

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.dims import on_diagonals
from hyper_parallel.platform.mindspore.ops.pointwise import addcdiv, addcmul
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, replicated

__all__ = ["METHODS", "REPLACED", "replacement"]


REPLACED: dict[str, Callable[..., Any]] = {}
"""The functions of MindSpore that are patched, by the name that dispatches them."""


def replacement(name: str, *homes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``run(ops, *args, **kwargs)`` for function ``name`` of ``homes``, by default of ``mindspore.ops``."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for home in homes or (functions,):
            spelled = f"{home.__name__.removeprefix('mindspore.')}.{name}"
            REPLACED[spelled] = getattr(home, name)
            decomposition(spelled)(lambda ops, _, *args, **kwargs: run(ops, *args, **kwargs))
        return run

    return register


# -- constants and random numbers of a tensor's shape ------------------------------------------------------------------


@replacement("full_like")
def _full_like(ops: Any, x: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    return ops.full_like(x, fill_value, dtype=dtype)


@replacement("rand_like")
def _rand_like(ops: Any, x: Any, seed: Any = None, *, dtype: Any = None) -> Any:
    del seed
    return ops.rand_like(x, dtype=dtype)


@replacement("randn_like")
def _randn_like(ops: Any, x: Any, seed: Any = None, *, dtype: Any = None) -> Any:
    del seed
    return ops.randn_like(x, dtype=dtype)


@replacement("randint_like")
def _randint_like(ops: Any, x: Any, low: int, high: int, seed: Any = None, *, dtype: Any = None) -> Any:
    del seed
    return ops.randint_like(x, low, high, dtype=dtype)


@replacement("bernoulli")
def _bernoulli(ops: Any, x: Any, p: Any = 0.5, seed: Any = None) -> Any:
    """Draw 0 or 1 for each element of ``x``; the values of ``x`` are not used."""
    del seed
    if not isinstance(p, (int, float)):
        msg = "operator ops.bernoulli: a tensor as p has no sharding rule; pass a number, or use mint.bernoulli"
        raise UnsupportedOperatorError(msg)
    return ops.cast(ops.lt(ops.rand_like(x, dtype=mindspore.float32), p), dtype=x.dtype)


# -- one element at a time ---------------------------------------------------------------------------------------------


@replacement("isreal")
def _isreal(ops: Any, x: Any) -> Any:
    return ops.eq(x, x) if x.is_complex() else ops.ones_like(x, dtype=mindspore.bool_)


@replacement("isposinf")
def _isposinf(ops: Any, x: Any) -> Any:
    return ops.isposinf(x)


@replacement("isneginf")
def _isneginf(ops: Any, x: Any) -> Any:
    return ops.isneginf(x)


@replacement("addcmul")
def _addcmul(ops: Any, x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    return addcmul(ops, None, x, first, second, value)


@replacement("addcdiv")
def _addcdiv(ops: Any, x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    return addcdiv(ops, None, x, first, second, value)


@replacement("rrelu")
def _rrelu(ops: Any, x: Any, lower: float = 1.0 / 8, upper: float = 1.0 / 3) -> Any:
    """Multiply each negative element by a random slope."""
    return ops.where(ops.ge(x, 0), x, ops.mul(x, ops.rand_like(x, low=lower, high=upper)))


@replacement("gumbel_softmax")
def _gumbel_softmax(ops: Any, x: Any, tau: float = 1.0, hard: bool = False, dim: int = -1) -> Any:
    expect("ops.gumbel_softmax", "hard", hard, False)
    noise = ops.neg(ops.log(ops.neg(ops.log(ops.clamp(ops.rand_like(x), min=1e-30)))))
    return ops.softmax(ops.div(ops.add(x, noise), tau), dim)


# -- reductions and differences ----------------------------------------------------------------------------------------


def _extreme(along: Any, whole: Any, x: Any, axis: Any, keepdims: bool) -> Any:
    """Return values and indices; without an axis, the extremum of all and index 0, as MindSpore does."""
    if axis is None:
        return whole(x), replicated(Tensor(0, mindspore.int64), x)
    return tuple(along(x, axis, keepdims))


def _unconditional(name: str, initial: Any, where: Any) -> None:
    expect(name, "initial", initial, None)
    if where is not None and where is not True:
        msg = f"operator {name}: where= has no sharding rule; use masked_fill first"
        raise UnsupportedOperatorError(msg)


@replacement("max")
def _max(ops: Any, x: Any, axis: Any = None, keepdims: bool = False, *, initial: Any = None, where: Any = None) -> Any:
    _unconditional("ops.max", initial, where)
    return _extreme(ops.max_along, ops.max, x, axis, keepdims)


@replacement("min")
def _min(ops: Any, x: Any, axis: Any = None, keepdims: bool = False, *, initial: Any = None, where: Any = None) -> Any:
    _unconditional("ops.min", initial, where)
    return _extreme(ops.min_along, ops.min, x, axis, keepdims)


@replacement("count_nonzero")
def _count_nonzero(ops: Any, x: Any, axis: Any = (), keep_dims: bool = False, dtype: Any = mindspore.int32) -> Any:
    """Count nonzero elements; the sum of 32-bit numbers has 64 bits, so it is cast."""
    counts = ops.sum(ops.cast(ops.ne(x, 0), dtype=dtype), None if axis == () else axis, keep_dims)
    return ops.cast(counts, dtype=dtype)


@replacement("nanmean")
def _nanmean(ops: Any, x: Any, axis: Any = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
    """Return the mean without NaN, composed: MindSpore's gradient would count the elements of one rank only."""
    count = ops.sum(ops.cast(ops.eq(x, x), dtype=x.dtype), axis, keepdims)
    return ops.div(ops.nansum(x, axis, keepdims, dtype=dtype), count)


@replacement("move_to")
def _move_to(ops: Any, x: Any, to: Any, blocking: bool = True) -> Any:
    del ops, to, blocking
    return x


@replacement("diff")
def _diff(ops: Any, x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the differences of neighbours along ``axis``, computed ``n`` times."""
    parts = [part for part in (prepend, x, append) if part is not None]
    x = ops.cat(parts, axis) if len(parts) > 1 else x
    for _ in range(n):
        x = ops.sub(*_neighbours(ops, x, axis))
    return x


def _neighbours(ops: Any, x: Any, dim: int) -> tuple[Any, Any]:
    count = x.shape[dim] - 1
    return ops.narrow(x, dim, 1, count), ops.narrow(x, dim, 0, count)


@replacement("trapz")
def _trapz(ops: Any, y: Any, x: Any = None, *, dx: float = 1.0, dim: int = -1) -> Any:
    """Integrate by the trapezoidal rule, in float32 unless ``y`` is float16."""
    y = y if y.dtype in (mindspore.float16, mindspore.float32) else ops.cast(y, dtype=mindspore.float32)
    heights = ops.div(ops.add(*_neighbours(ops, y, dim)), 2)
    if x is None:
        return ops.sum(ops.mul(heights, dx), dim)
    if len(x.shape) == 1:
        x = ops.view(x, tuple(-1 if axis == dim % len(y.shape) else 1 for axis in range(len(y.shape))))
    return ops.sum(ops.mul(heights, ops.sub(*_neighbours(ops, x, dim))), dim)


# -- clipping ----------------------------------------------------------------------------------------------------------


def _on_one_mesh(xs: Sequence[Any]) -> list[Any]:
    """Return plain tensors among DTensors as replicated ones: they are equal on all ranks, as gradients are."""
    first = next(x for x in xs if isinstance(x, DTensor))
    return [x if isinstance(x, DTensor) else replicated(x, first) for x in xs]


def _as_they_were(clipped: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, ...]:
    """Return DTensors for DTensors, plain tensors for plain ones."""
    pairs = zip(clipped, xs, strict=True)
    return tuple(each if isinstance(x, DTensor) else each.full_tensor() for each, x in pairs)


@replacement("clip_by_global_norm")
def _clip_by_global_norm(ops: Any, xs: Sequence[Any], clip_norm: float = 1.0, use_norm: Any = None) -> Any:
    """Scale all tensors so that their global norm is at most ``clip_norm``; plain ones count as replicated."""
    expect("ops.clip_by_global_norm", "use_norm", use_norm, None)
    dtensors = _on_one_mesh(xs)
    total = None
    for x in dtensors:
        square = ops.sum(ops.square(ops.cast(x, dtype=mindspore.float32)))
        total = square if total is None else ops.add(total, square)
    scale = ops.div(clip_norm, ops.clamp(ops.sqrt(total), min=clip_norm))
    return _as_they_were([ops.mul(x, ops.cast(scale, dtype=x.dtype)) for x in dtensors], xs)


@replacement("clip_by_norm")
def _clip_by_norm(ops: Any, xs: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
    """Scale one tensor or several so that their norm of order ``norm_type`` is below ``max_norm``.

    Raises:
        UnsupportedOperatorError: ``norm_type`` is neither 2 nor infinite; MindSpore omits absolute values in others.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if norm_type != float("inf"):
        expect("ops.clip_by_norm", "norm_type", float(norm_type), 2.0)
    listed = [xs] if isinstance(xs, Tensor) else list(xs)
    dtensors = _on_one_mesh(listed)
    parts = [ops.abs(ops.cast(x, dtype=mindspore.float32)) for x in dtensors]
    total: Any = None
    for part in parts:
        if norm_type == float("inf"):
            power = ops.amax(part)
            total = power if total is None else ops.maximum(total, power)
        else:
            power = ops.sum(ops.pow(part, norm_type))
            total = power if total is None else ops.add(total, power)
    norm = total if norm_type == float("inf") else ops.pow(total, 1.0 / norm_type)
    if all(not (x.is_floating_point() or x.is_complex()) for x in dtensors):  # the norm of integers is an integer
        norm = ops.cast(ops.cast(norm, dtype=dtensors[0].dtype), dtype=mindspore.float32)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        msg = f"For clip_by_norm, the total norm of order {norm_type} from input is non-finite."
        raise RuntimeError(msg)
    factor = ops.clamp(ops.div(max_norm, ops.add(norm, 1e-6)), max=1.0)
    scaled = [ops.mul(x, ops.cast(factor, dtype=x.dtype if x.is_floating_point() else factor.dtype)) for x in dtensors]
    clipped = _as_they_were(scaled, listed)
    return clipped[0] if isinstance(xs, Tensor) else clipped


# -- shapes and products -----------------------------------------------------------------------------------------------


@replacement("diag_embed")
def _diag_embed(ops: Any, x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Return the last dim on a diagonal of two new dims."""
    count = len(x.shape) + 1
    first, second = dim1 % count, dim2 % count
    if first > second:
        first, second, offset = second, first, -offset
    return ops.movedim(on_diagonals(ops, x, offset), (-2, -1), (first, second))


@replacement("block_diag")
def _block_diag(ops: Any, *blocks: Any) -> Any:
    return ops.block_diag(*blocks)


@replacement("bucketize")
def _bucketize(ops: Any, x: Any, boundaries: Any, *, right: bool = False) -> Any:
    edges = boundaries if isinstance(boundaries, DTensor) else replicated(Tensor(boundaries, x.dtype), x)
    return ops.bucketize(x, edges, out_int32=True, right=right)


@replacement("bincount")
def _bincount(ops: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count the occurrences of each integer, or sum their weights; in float32."""
    weights = weights if weights is None else ops.cast(weights, dtype=mindspore.float32)
    return ops.cast(ops.bincount(ops.cast(x, dtype=mindspore.int64), weights, minlength), dtype=mindspore.float32)


@replacement("einsum", functions, mint)
def _einsum(ops: Any, equation: str, *operands: Any) -> Any:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        msg = "operator einsum: every operand must be a DTensor, and the equation comes first"
        raise UnsupportedOperatorError(msg)
    return ops.einsum(equation, *tensors)


METHODS = (
    "chunk", "expand_as", "flatten", "index_select", "isclose", "matmul", "nansum", "narrow", "remainder", "select",
    "split", "sub", "tile", "unsqueeze", "view_as", "where",
)  # fmt: skip
"""Methods with an older form, which MindSpore dispatches under a name that begins with ``Deprecated``."""


def _run(function: Callable[..., Any], ops: Any, primitive: Any, *args: Any, **kwargs: Any) -> Any:
    del ops, primitive
    return function(*args, **kwargs)


for method in METHODS:
    name = "Deprecated" + "".join(map(str.capitalize, method.split("_")))
    decomposition(name)(partial(_run, getattr(tensor_method, f"deprecated_tensor_{method}")))

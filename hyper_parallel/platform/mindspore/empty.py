"""Operators on empty pieces.

MindSpore's CPU kernels leave memory as they found it where they reduce over no element at all: a sum, a contraction,
and the gradient of anything that was broadcast. Here such results are what mathematics says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function
from mindspore.common.api import _no_grad, _pynative_executor

from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["nothing", "tolerant"]

# What a reduction over no element gives.
IDENTITY: dict[str, Any] = {
    "sum": 0,
    "nansum": 0,
    "count_nonzero": 0,
    "bincount_to": 0,
    "dot": 0,
    "histc": 0,
    "vector_norm": 0,
    "mean": float("nan"),
    "prod": 1,
    "any": False,
    "all": True,
    "linear": 0,
    "matmul": 0,
}
# Writing no element at all leaves the first operand as it is.
UNCHANGED = frozenset({"scatter", "scatter_add", "index_add"})
# Operands that no gradient reaches. Every rank must run the same collectives in backward, so an empty piece may not
# have a gradient where the others have none.
FLAT: dict[str, tuple[int, ...]] = {
    "ceil": (0,), "copysign": (1,), "floor_divide": (0, 1), "heaviside": (0,), "round": (0,), "sgn": (0,), "sign": (0,),
}  # fmt: skip
# Right about empty operands by themselves; the last two may return their operand.
RELIABLE = frozenset({"cat", "pick", "cast", "contiguous"})
# Operators whose arguments say sizes, or that refuse the zeros by which others are asked: their kernels are right about
# shapes.
SIZED = frozenset({"view", "expand", "narrow", "split", "select", "unbind", "linear", "matmul", "mvlgamma"})


class _Zeros(_Function):
    """Zeros that autograd takes to be made of ``source``, as often as it differentiates them."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """The zeros."""
        ctx.like = (tuple(source.shape), source.dtype)
        return mint.zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Zeros again."""
        return _Zeros.apply(grad, *ctx.like), None, None


class _Made(NamedTuple):
    """Results over no element, and the same call on operands in the place of its own, or None for one linear in each.

    A second backward runs the collectives of what the first one was made of, on every rank: so the gradients of an
    empty piece have to be made of what they are made of elsewhere. The call tells, on pieces of one element.
    """

    results: list[Tensor]
    again: Callable[[Sequence[Tensor]], Any] | None = None


class _Constant(_Function):
    """Given results that no input element reached: every gradient is zero."""

    @staticmethod
    def forward(ctx: Any, made: _Made, *inputs: Tensor) -> Any:
        """The results."""
        ctx.again, ctx.given = made.again, inputs
        return made.results[0] if len(made.results) == 1 else tuple(made.results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Zeros."""
        return (None, *_zero_gradients(ctx.given, grads, ctx.again))


def _zero_gradients(
    given: Sequence[Tensor], grads: Sequence[Tensor], again: Callable[[Sequence[Tensor]], Any] | None
) -> list[Tensor]:
    zeros = [mint.zeros(tuple(one.shape), dtype=one.dtype) for one in given]
    if not _pynative_executor.requires_grad():  # nobody differentiates the gradients
        return zeros
    sources = _made_of_grads(given, grads) if again is None else _made_of(given, grads, again)
    return [
        zero if source is None or not _needs_grad(source) else _Zeros.apply(source, tuple(zero.shape), zero.dtype)
        for zero, source in zip(zeros, sources, strict=True)
    ]


def _needs_grad(one: Tensor) -> bool:
    return bool(one._requires_grad)  # noqa: SLF001 - no public spelling


def _of_one(one: Tensor) -> tuple[int, ...]:
    return tuple(size or 1 for size in one.shape)


def _made_of_grads(given: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    source = next((one for one in grads if _needs_grad(one)), None)
    return [source if _carries_gradient(one) else None for one in given]


def _made_of(
    given: Sequence[Tensor], grads: Sequence[Tensor], again: Callable[[Sequence[Tensor]], Any]
) -> list[Tensor | None]:
    """Gradients of the same call on pieces of one element, made of ``given`` and ``grads``."""
    pieces = [_Zeros.apply(one, _of_one(one), one.dtype) if _needs_grad(one) else _stretched(one, 1) for one in given]
    asked = [index for index, one in enumerate(given) if _needs_grad(one)]

    def pulled(*leaves: Tensor) -> Tensor:
        filled = list(pieces)
        for index, leaf in zip(asked, leaves, strict=True):
            filled[index] = leaf
        outs = again(filled)
        pairs = zip(outs if isinstance(outs, (list, tuple)) else (outs,), grads, strict=True)
        floating = ((out, grad) for out, grad in pairs if _carries_gradient(out))
        return sum((out * _Zeros.apply(grad, tuple(out.shape), out.dtype)).sum() for out, grad in floating)

    found: list[Tensor | None] = [None] * len(given)
    if asked:
        grads_of = mindspore.grad(pulled, tuple(range(len(asked))))(*(pieces[index] for index in asked))
        for index, grad in zip(asked, grads_of if len(asked) > 1 else (grads_of,), strict=True):
            found[index] = grad
    return found


class _Unchanged(_Function):
    """The first operand: nothing was written into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Any:
        """A copy."""
        ctx.given = others
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Everything to the first operand."""
        return (grad, *_zero_gradients(ctx.given, (grad,), None))


def nothing(shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """A result without elements, of the first input's dtype, made of ``inputs``, whose gradients are zero.

    Kernels sum over no element and leave what was there.
    """
    return _Constant.apply(_Made([mint.zeros(shape, dtype=inputs[0].dtype)]), *inputs)


def tolerant(op: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute``, right also where a piece is empty."""
    if op in RELIABLE:
        return compute

    @wraps(compute)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("window") is not None:  # lookups in a piece of a table see to empty ones themselves
            return compute(*args, **kwargs)
        for one in args:
            if isinstance(one, Tensor) and 0 in one.shape:
                return _run_empty(op, compute, args, kwargs)
        if kwargs and any(0 in one.shape for one in _tensors(tuple(kwargs.values()))):
            return _run_empty(op, compute, args, kwargs)
        return compute(*args, **kwargs)

    return run


def _run_empty(op: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = list(_tensors((args, tuple(kwargs.values()))))
    if op in UNCHANGED and 0 not in operands[0].shape:
        return _Unchanged.apply(*operands)
    with _no_grad():
        outs = INDEXING[op](*args, **kwargs) if op in INDEXING else _computed(op, compute, args, kwargs)
    many = isinstance(outs, list)
    made = [_value(op, shape, dtype) for shape, dtype in (outs if many else [outs])]
    linear = op in INDEXING or op in SIZED - {"linear", "matmul"}

    def again(others: Sequence[Tensor]) -> Any:
        rest = iter(others)
        return compute(*_with(args, rest), **_with(kwargs, rest))

    flat = (0, 1) if kwargs.get("rounding_mode") is not None else FLAT.get(op, ())
    reached = [ops.stop_gradient(one) if index in flat else one for index, one in enumerate(operands)]
    if not any(_carries_gradient(one) for one in made):
        return tuple(made) if many else made[0]
    found = _Constant.apply(_Made(made, None if linear else again), *reached)
    if not many:
        return found
    results = (found,) if len(made) == 1 else found
    return tuple(one if _carries_gradient(own) else own for one, own in zip(results, made, strict=True))


def _carries_gradient(made: Tensor) -> bool:
    """Not places, counts and truths: cast to floating, they have no gradient on ranks whose pieces are not empty."""
    return str(made.dtype).startswith(("Float", "BFloat", "Complex"))


def _indexed(x: Tensor, index: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of ``x[index]``, by NumPy: MindSpore's own slicing of an empty tensor may divide by zero."""
    return np.broadcast_to(0, tuple(x.shape))[index].shape, x.dtype


def _sliced(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[tuple[int, ...], Any]:
    return _indexed(x, (slice(None),) * (dim % x.ndim) + (slice(start, end, step),))


INDEXING: dict[str, Callable[..., Any]] = {"getitem": _indexed, "slice": _sliced}


def _computed(op: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_as_computed if op in SIZED else _extrapolated)(compute, args, kwargs)


def _as_computed(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shape and dtype of the result, or of each."""
    outs = compute(*args, **kwargs)
    return (
        [(tuple(one.shape), one.dtype) for one in outs]
        if isinstance(outs, (list, tuple))
        else (tuple(outs.shape), outs.dtype)
    )


def _extrapolated(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same without asking a kernel about empty operands: sizes are linear in the size that is zero."""
    one, two = (_as_computed(compute, _stretched(args, size), _stretched(kwargs, size)) for size in (1, 2))
    if isinstance(one, list):
        return [_line(first, second) for first, second in zip(one, two, strict=True)]
    return _line(one, two)


def _line(one: tuple[tuple[int, ...], Any], two: tuple[tuple[int, ...], Any]) -> tuple[tuple[int, ...], Any]:
    return tuple(2 * first - second for first, second in zip(one[0], two[0], strict=True)), one[1]


def _with(tree: Any, operands: Iterator[Tensor]) -> Any:
    """``tree`` with ``operands`` in the places of its tensors."""
    if isinstance(tree, Tensor):
        return next(operands)
    if isinstance(tree, dict):
        return {name: _with(item, operands) for name, item in tree.items()}
    return type(tree)(_with(item, operands) for item in tree) if isinstance(tree, (list, tuple)) else tree


def _stretched(tree: Any, size: int) -> Any:
    if isinstance(tree, Tensor):
        return ops.zeros(tuple(one or size for one in tree.shape), tree.dtype) if 0 in tree.shape else tree
    if isinstance(tree, dict):
        return {name: _stretched(item, size) for name, item in tree.items()}
    return type(tree)(_stretched(item, size) for item in tree) if isinstance(tree, (list, tuple)) else tree


def _value(op: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
    if 0 in shape:
        return mint.zeros(shape, dtype=dtype)
    if op not in IDENTITY:
        msg = f"{op}: this rank's piece is empty and the result over no element is not defined; redistribute it first"
        raise UnsupportedOperatorError(msg)
    return ops.full(shape, IDENTITY[op], dtype=dtype)


def _tensors(tree: Any) -> Iterator[Tensor]:
    for one in tree:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)

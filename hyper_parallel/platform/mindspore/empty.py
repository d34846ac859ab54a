"""Operators on empty pieces.

MindSpore's CPU kernels leave memory as they found it where they reduce over no element at all: a sum, a contraction,
and the gradient of anything that was broadcast. Here such results are what mathematics says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function
from mindspore.common.api import _no_grad

from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["tolerant"]

# What a reduction over no element gives.
IDENTITY: dict[str, Any] = {
    "sum": 0,
    "mean": float("nan"),
    "prod": 1,
    "any": False,
    "all": True,
    "linear": 0,
    "matmul": 0,
}
# Kernels that are right about empty operands by themselves.
RELIABLE = frozenset({"cat"})


class _Constant(_Function):  # type: ignore[misc] # MindSpore ships no types
    """Given results that no input element reached: every gradient is zero."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], *inputs: Tensor) -> Any:
        """The results."""
        ctx.like = [(tuple(one.shape), one.dtype) for one in inputs]
        return made[0] if len(made) == 1 else tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Zeros."""
        del grads
        return (None, *(mint.zeros(shape, dtype=dtype) for shape, dtype in ctx.like))


def tolerant(op: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute``, right also where a piece is empty."""
    if op in RELIABLE:
        return compute

    @wraps(compute)
    def run(*args: Any, **kwargs: Any) -> Any:
        for one in args:
            if isinstance(one, Tensor) and 0 in one.shape:
                return _run_empty(op, compute, args, kwargs)
        if kwargs and any(0 in one.shape for one in _tensors(tuple(kwargs.values()))):
            return _run_empty(op, compute, args, kwargs)
        return compute(*args, **kwargs)

    return run


def _run_empty(op: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _no_grad():
        outs = compute(*args, **kwargs)
    many = isinstance(outs, (list, tuple))
    made = [_value(op, ops.stop_gradient(out)) for out in (outs if many else (outs,))]
    found = _Constant.apply(made, *_tensors((args, tuple(kwargs.values()))))
    if many and len(made) == 1:
        return type(outs)((found,))
    return type(outs)(found) if many else found


def _value(op: str, out: Tensor) -> Tensor:
    if 0 in out.shape:
        return out
    if op not in IDENTITY:
        msg = f"{op}: this rank's piece is empty and the result over no element is not defined; redistribute it first"
        raise UnsupportedOperatorError(msg)
    return ops.full(tuple(out.shape), IDENTITY[op], dtype=out.dtype)


def _tensors(tree: Any) -> Iterator[Tensor]:
    for one in tree:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)

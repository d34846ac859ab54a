"""``value_and_grad`` that returns gradients as DTensors.

MindSpore differentiates functions and returns gradients of the local tensors. Under the gradient contract those are
true gradients already; here they only get back the layout that says what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore

from hyper_parallel.core.dtensor.deferred_gradients import DeferredGradient, add_deferred, deferred_of, drop_deferred
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.platform.mindspore.dtensor import wrap

__all__ = ["WANTED", "value_and_grad"]

WANTED = "_hyper_parallel_wanted"
"""Marks local tensors of parameters by which :func:`value_and_grad` differentiates now."""


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """``mindspore.value_and_grad``, whose gradients of DTensors are DTensors in the dual layout.

    Args:
        fn: a function or Cell; its first output is differentiated. An output with a pending reduction is reduced, so
            that its value is the true one.
        grad_position: which positional arguments to differentiate by.
        weights: parameters to differentiate by.
        has_aux: only the first output is differentiated, the others are passed on.

    Returns:
        a function of the arguments of ``fn`` that returns the outputs and the gradients, nested as MindSpore does it.
        Inside ``defer_grad_reduce()`` the gradients of ``weights`` are ``Partial``.
    """
    run = mindspore.value_and_grad(_settled(fn), grad_position, weights, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with _wanting(weights):
            value, grads = run(*args, **kwargs)
            if grad_position is None:
                return value, _laid_out(grads, weights)
            inputs = args[grad_position] if isinstance(grad_position, int) else [args[index] for index in grad_position]
            if weights is None:
                return value, _laid_out(grads, inputs)
            return value, (_laid_out(grads[0], inputs), _laid_out(grads[1], weights))

    return differentiated


@contextmanager
def _wanting(weights: Any) -> Iterator[None]:
    """While ``weights`` are differentiated by; what their gradients owe is theirs, and forgotten afterwards."""
    several = weights if isinstance(weights, (list, tuple)) else (weights,)
    given = {id(one._local): one._local for one in several if isinstance(one, DTensor)}
    locals_ = [one for one in given.values() if not hasattr(one, WANTED)]  # by an outer differentiation, perhaps
    for local in locals_:
        setattr(local, WANTED, True)
    try:
        yield
    finally:
        for local in locals_:
            delattr(local, WANTED)
            drop_deferred(local)


def _settled(fn: Callable[..., Any]) -> Callable[..., Any]:
    def settled(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        if isinstance(out, tuple):
            return tuple(_reduced(one) for one in out)
        return _reduced(out)

    return settled


def _reduced(out: Any) -> Any:
    return out.reduce_partial() if isinstance(out, DTensor) else out


def _laid_out(grads: Any, values: Any) -> Any:
    """Each gradient in the layout that its value implies; MindSpore returns a single one bare."""
    if isinstance(grads, (list, tuple)):
        several = values if isinstance(values, (list, tuple)) else (values,)
        return type(grads)(_laid_out(grad, one) for grad, one in zip(grads, several, strict=True))
    if isinstance(values, (list, tuple)):
        (values,) = values
    if not isinstance(values, DTensor):
        return grads
    held = deferred_of(values._local)
    true = DeferredGradient(dual(values.layout), grads, None, "")
    whole = true if held is None else add_deferred(held, true, values._platform)
    return wrap(whole.partial_value, whole.layout)

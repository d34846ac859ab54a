"""``value_and_grad`` that returns gradients as DTensors.

MindSpore differentiates functions and returns gradients, which ``gradients.py`` wraps as DTensors. The function here
also reduces the differentiated value, if it is partial, and adds the gradients whose reduction was deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore

from hyper_parallel.core.dtensor.deferred_gradients import DeferredGradient, add_deferred, clear_deferred, get_deferred
from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["DIFFERENTIATED", "value_and_grad"]

DIFFERENTIATED = "_hyper_parallel_differentiated"
"""Attribute of local tensors of parameters that :func:`value_and_grad` differentiates with respect to."""


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """``mindspore.value_and_grad`` that returns the gradients of DTensors as DTensors in the dual layout.

    Args:
        fn: a function or Cell; its first output is differentiated. A partial output is reduced first.
        grad_position: positional arguments to differentiate with respect to.
        weights: parameters to differentiate with respect to.
        has_aux: differentiate only the first output and return the others unchanged.

    Returns:
        a function of the arguments of ``fn`` that returns the outputs and the gradients, nested as MindSpore does it.
        Inside ``defer_grad_reduce()`` the gradients of ``weights`` are ``Partial``.
    """
    run = mindspore.value_and_grad(_with_reduced_outputs(fn), grad_position, weights, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with _marked_as_differentiated(weights):
            value, grads = run(*args, **kwargs)
            if weights is None:
                return value, grads
            if grad_position is None:
                return value, _with_deferred(grads, weights)
            return value, (grads[0], _with_deferred(grads[1], weights))

    return differentiated


@contextmanager
def _marked_as_differentiated(weights: Any) -> Iterator[None]:
    """Mark ``weights`` inside this context; drop their deferred gradients at its end."""
    weights = weights if isinstance(weights, (list, tuple)) else (weights,)
    by_id = {id(weight._local): weight._local for weight in weights if isinstance(weight, DTensor)}
    unmarked = [local for local in by_id.values() if not hasattr(local, DIFFERENTIATED)]  # by an outer call
    for local in unmarked:
        setattr(local, DIFFERENTIATED, True)
    try:
        yield
    finally:
        for local in unmarked:
            delattr(local, DIFFERENTIATED)
            clear_deferred(local)


def _with_reduced_outputs(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        if isinstance(out, tuple):
            return tuple(_reduced(value) for value in out)
        return _reduced(out)

    return run


def _reduced(out: Any) -> Any:
    return out.reduce_partial() if isinstance(out, DTensor) else out


def _with_deferred(grads: Any, values: Any) -> Any:
    """Add the deferred gradients to ``grads``, which is a tuple, or a single gradient for a single parameter."""
    if isinstance(grads, (list, tuple)):
        sources = values if isinstance(values, (list, tuple)) else (values,)
        return type(grads)(_with_deferred(grad, source) for grad, source in zip(grads, sources, strict=True))
    deferred = get_deferred(values._local) if isinstance(values, DTensor) else None
    if deferred is None:
        return grads
    own = DeferredGradient(grads.layout, grads._local, None, "")
    whole = add_deferred(deferred, own, values._platform)
    return values._platform.wrap(whole.partial_value, whole.layout)

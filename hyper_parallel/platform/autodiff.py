"""Gradients of functions: what MindSpore differentiates by, under the library's own name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.select import get_platform

__all__ = ["value_and_grad"]


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """``mindspore.value_and_grad``, whose gradients of DTensors are DTensors in the dual layout.

    Args:
        fn: a function or Cell; its first output is differentiated. An output with a pending reduction is reduced.
        grad_position: which positional arguments to differentiate by.
        weights: parameters to differentiate by.
        has_aux: only the first output is differentiated, the others are passed on.

    Returns:
        a function of the arguments of ``fn`` that returns the outputs and the gradients, nested as MindSpore does it.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) on PyTorch, where ``loss.backward()`` does this.
    """
    return get_platform().value_and_grad(fn, grad_position, weights, has_aux)

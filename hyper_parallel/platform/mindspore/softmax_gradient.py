"""A guard of MindSpore's softmax gradient, which an axis of size 1 corrupts for the rest of the process.

MindSpore 2.10 generates the gradient of ``Softmax`` as products and a sum along the axis, omits the sum where the axis
has size 1, and caches the result by number of dims, axis and dtype: without a sum, the gradients of all later
softmaxes of that kind are wrong. So a softmax along an axis of size 1 is computed with different operators, both for
plain tensors and for local tensors of DTensors. Gradients that MindSpore has cached are dropped when the platform
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.mindspore.versions import jit_context, pynative_executor

__all__ = ["forget_gradients", "primitive_without_size_one", "without_size_one"]


def without_size_one(softmax: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``softmax(operator, input, axis)``."""

    @wraps(softmax)
    def run(operator: Any, input: Any, axis: Any) -> Any:  # noqa: A002 - MindSpore's name
        return _of_size_one(input) if _has_size_one(input, axis) else softmax(operator, input, axis)

    return run


def primitive_without_size_one(softmax: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``softmax(operator, [input, axis])``; bytecode capture needs the operator, and has its own gradients."""

    @wraps(softmax)
    def run(operator: Any, operands: list[Any]) -> Any:
        tensor, axis = operands
        return (
            _of_size_one(tensor) if not jit_context() and _has_size_one(tensor, axis) else softmax(operator, operands)
        )

    return run


def forget_gradients() -> None:
    """Drop the gradients that MindSpore has cached so far; do not call this while it differentiates."""
    pynative_executor.clear_res()


def _has_size_one(tensor: Any, axis: Any) -> bool:
    """True for a plain floating-point tensor if ``axis``, a number or a tuple, has size 1."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or not tensor.is_floating_point():
        return False
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    shape = tensor.shape
    return all(isinstance(dim, int) and -len(shape) <= dim < len(shape) and shape[dim] == 1 for dim in axes)


def _of_size_one(tensor: Tensor) -> Tensor:
    """Return ones with gradient zero; NaN where softmax is NaN, which is at NaN and at infinities."""
    return mint.exp(tensor - tensor)

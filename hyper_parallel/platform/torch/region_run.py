"""Runs a traced region as one autograd node, with the functions of forward and backward.

AOTAutograd's own node handles more cases and costs more per call: it rebuilds outputs that alias inputs, writes mutated
inputs back, and handles subclasses. If a region needs none of that, this node replaces it after the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.autograd import LocalFunction
from hyper_parallel.platform.torch.versions import is_view, release_saved

__all__ = ["Halves", "refuse_second_derivative", "single_node"]

Run = Callable[[list[Any]], Sequence[Any]]
"""Function of a list of inputs, which it empties."""


@dataclass
class Halves:
    """The results of a trace, for :func:`single_node`.

    Attributes:
        forward: takes the inputs; returns ``outputs`` results, then the tensors that backward needs.
        backward: takes these tensors and the gradients of outputs; returns the gradients of inputs. None if no input
            requires a gradient.
        inputs: number of inputs.
        outputs: number of outputs.
        strides: traced strides of the gradients of outputs, as ``backward`` needs them.
    """

    forward: Run
    inputs: int
    outputs: int
    backward: Run | None = None
    strides: Sequence[tuple[int, ...]] = ()


def single_node(halves: Halves, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., Any] | None:
    """Return a function that runs the region, or None if the region needs AOTAutograd's node.

    Args:
        halves: the traced forward and backward.
        inputs: inputs of the region's first call.
        outputs: outputs of the first call, from AOTAutograd's node.
    """
    storages = {each.untyped_storage().data_ptr() for each in inputs}
    apart = len(storages) + len(outputs) == len(storages | {each.untyped_storage().data_ptr() for each in outputs})
    if not apart or len(inputs) != halves.inputs or len(outputs) != halves.outputs:
        return None
    if halves.backward is None:
        return _constant(halves.forward)
    with_gradient = [index for index, output in enumerate(outputs) if output.requires_grad]
    if len(with_gradient) != len(halves.strides):
        return None
    return _differentiable(halves, halves.backward, with_gradient)


def _constant(forward: Run) -> Callable[..., Any]:
    """Return a function that runs only forward; its results have no gradient, even if inputs require one."""

    def run(*inputs: Any) -> Any:
        with torch.no_grad():
            return forward([*inputs])

    return run


def _differentiable(halves: Halves, run_backward: Run, with_gradient: Sequence[int]) -> Callable[..., Any]:
    """An autograd function of the two halves."""
    run, count = halves.forward, halves.outputs
    views: list[int] | None = None  # views made in forward: returned and saved without their base
    constant = sorted({*range(count)} - {*with_gradient})
    expected = list(zip(with_gradient, halves.strides, strict=True))

    def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
        nonlocal views
        results: Any = run([*inputs])
        if views is None:
            given = {*map(id, inputs)}
            views = [at for at, each in enumerate(results) if is_view(each) and id(each) not in given]
        for index in views:
            results[index] = results[index].detach()
        ctx.save_for_backward(*results[count:])
        if constant:
            ctx.mark_non_differentiable(*(results[index] for index in constant))
        return tuple(results[:count])

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        taken = [*ctx.saved_tensors, *(_strided(gradients[index], strides) for index, strides in expected)]
        release_saved(ctx)
        if not torch.is_grad_enabled():
            return tuple(run_backward(taken))
        read = [each for each in taken if each.requires_grad]
        with torch.no_grad():
            results = run_backward(taken)
        once: tuple[Any, ...] = _FirstOrder.apply(len(results), *results, *read, torch.empty(0, requires_grad=True))
        return once

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type("CompiledRegion", (LocalFunction,), members)
    return function._native  # noqa: SLF001 - inherited


def _strided(gradient: Any, strides: tuple[int, ...]) -> Any:
    """Return ``gradient`` with the strides for which backward was traced."""
    if gradient.stride() == strides:
        return gradient
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class _FirstOrder(LocalFunction):
    """Gradients that cannot be differentiated again, although they depend on inputs that require a gradient."""

    @staticmethod
    def forward(ctx: Any, count: int, *gradients_and_read: Any) -> tuple[Any, ...]:
        del ctx
        return gradients_and_read[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        raise UnsupportedOperatorError(_UNRECORDED)


_UNRECORDED = (
    "compile: gradients of gradients (create_graph=True) through a compiled module are not recorded; compute them with "
    "the uncompiled module"
)


def refuse_second_derivative(error: BaseException) -> None:
    """Raise the error of this module if ``error`` is AOTAutograd's for the same case, from the first call."""
    if isinstance(error, RuntimeError) and "aot_autograd does not currently support double backward" in str(error):
        raise UnsupportedOperatorError(_UNRECORDED) from error

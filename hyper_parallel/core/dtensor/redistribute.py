"""Runs transitions: forward runs the steps, backward runs the steps of the adjoint.

No autograd node is created if no gradient is needed. Backward runs through the same functions, so it is differentiable
too.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.dtensor.events import PendingRedistribution, module_path, notify, watchers
from hyper_parallel.core.dtensor.transition import Transition, plan_transition
from hyper_parallel.errors import MeshError, ShardMismatchError, UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.dtensor.events import Cause, Watcher
    from hyper_parallel.core.dtensor.steps import AllReduce
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["gathered_view", "redistribute", "redistribute_in_dtypes", "reduce_deferred"]

_LOCK = threading.Lock()
_CACHE = "_hyper_parallel_redistribution"


class _Context(NamedTuple):
    """Context of a run of a transition; forward passes it on to backward.

    Attributes:
        platform: the framework of the tensors.
        cause: the operator that needs the transition; None if the program requested it.
        module: path of the module that runs.
        watchers: watchers of the forward.
        on_backward: called when a gradient arrives in backward.
        phase: ``forward`` or ``backward``.
        defer: called in backward with the gradient; returns True if it keeps the gradient for a later reduction.
    """

    platform: Platform
    cause: Cause | None
    module: str
    watchers: tuple[Watcher, ...]
    on_backward: Callable[[], None] | None = None
    phase: str = "forward"
    defer: Callable[[Any], bool] | None = None


class _Functions(NamedTuple):
    """The autograd functions derived from one framework's ``Function``."""

    linear: Any
    extremum: Any
    gathered: Any
    cast: Any


def redistribute(
    local: Any,
    transition: Transition,
    platform: Platform,
    cause: Cause | None = None,
    on_backward: Callable[[], None] | None = None,
    defer: Callable[[Any], bool] | None = None,
) -> Any:
    """Return the local tensor in the target layout of ``transition``, on the graph.

    Args:
        local: this rank's plain tensor in the source layout.
        transition: from :func:`~hyper_parallel.core.dtensor.transition.plan_transition`.
        platform: the framework of ``local``.
        cause: the operator that needs it, for the event log and ``strict()``; None if the program requested it.
        on_backward: called when a gradient arrives in backward.
        defer: called in backward with the gradient; returns True if it keeps the gradient, so that none is passed on.

    Raises:
        ShardMismatchError: (a ValueError) ``local`` does not have the local shape of the source layout.
        MeshError: the transition was planned on another rank.
        UnsupportedOperatorError: a gradient is needed through Partial(prod), Partial(all) or Partial(any), or a
            forward-mode derivative through any step.
        StrictModeError: an implicit redistribution is forbidden by ``strict()`` or ``implicit_budget()``.
    """
    if not (platform.grad_enabled() and platform.needs_grad(local)) or not platform.is_floating(local):
        if not transition.steps:
            return local
        _check(local, transition, platform)
        if watchers() and transition.communicates:
            _notify(local, transition, _Context(platform, cause, "", ()), "forward")
        return _applied(local, transition, platform)
    if transition.is_trivial:
        return local
    context = _Context(platform, cause, module_path(), watchers(), on_backward, defer=defer)
    return _differentiable(local, transition, context)


def redistribute_in_dtypes(
    local: Any, transition: Transition, platform: Platform, forward_dtype: Any, backward_dtype: Any
) -> Any:
    """Return the local tensor in the target layout and ``forward_dtype``, on the graph.

    Args:
        local: this rank's plain tensor in the source layout.
        transition: from :func:`~hyper_parallel.core.dtensor.transition.plan_transition`.
        platform: the framework of ``local``.
        forward_dtype: dtype in which forward communicates, and dtype of the result; None for that of ``local``.
        backward_dtype: dtype in which backward communicates; None for that of ``local``, to which the gradient is cast
            afterwards.

    Raises:
        UnsupportedOperatorError: ``local`` or a dtype is not real floating, or the transition reduces by an operation
            other than sum and avg.
    """
    before = platform.tensor_type_cast(local, local.dtype if forward_dtype is None else forward_dtype)
    gradient = platform.zeros((1,), local.dtype if backward_dtype is None else backward_dtype)
    if transition.extremum is not None or not all(map(platform.is_real_floating, (local, before, gradient))):
        msg = (
            "redistribute: forward_dtype and backward_dtype require real floating tensors and dtypes, and no reduction "
            f"except sum and avg; got {before.dtype} and {gradient.dtype} for "
            f"{transition.source.notation(local.dtype)}; cast the tensor before or after redistribute() instead"
        )
        raise UnsupportedOperatorError(msg)
    if not (platform.grad_enabled() and platform.needs_grad(local)):
        return redistribute(before, transition, platform)
    context = _Context(platform, None, module_path(), watchers())
    return _functions(platform).cast.apply(local, transition, context, (before.dtype, gradient.dtype))


def gathered_view(
    source_local: Any,
    gathered_local: Any,
    transition: Transition,
    axes: Sequence[int],
    platform: Platform,
    on_backward: Callable[[], None] | None = None,
) -> Any:
    """Return a view of ``gathered_local`` with its own backward: one reduce-scatter to ``source_local``.

    Forward does not communicate.

    Args:
        source_local: the local tensor that was gathered.
        gathered_local: the result of ``transition``.
        transition: the transition between them.
        axes: mesh axes, replicated in the target, along which the other operands of the consumer differ.
        platform: the framework of both.
        on_backward: called when a gradient arrives in backward.

    Returns:
        a tensor with the values of ``gathered_local``. Its gradient goes to ``source_local`` by one reduce-scatter,
        instead of an all-reduce and a slice.
    """
    if not (platform.grad_enabled() and platform.needs_grad(source_local)):
        return gathered_local
    varying = plan_transition(transition.source, transition.target, axes)
    context = _Context(platform, None, module_path(), watchers(), on_backward)
    # In a tuple: as a separate argument it would count as an operand and would have to be detached.
    return _functions(platform).gathered.apply(source_local, (gathered_local,), varying, context)


def reduce_deferred(grad: Any, transition: Transition, platform: Platform, cause: Cause | None, module: str) -> Any:
    """Return a deferred gradient, reduced by ``transition``; ``cause`` and ``module`` are those of the forward."""
    return _run(grad, transition, _Context(platform, cause, module, ()), "backward")


def _differentiable(local: Any, transition: Transition, context: _Context) -> Any:
    functions = _functions(context.platform)
    if transition.extremum is None:
        return functions.linear.apply(local, transition, context)
    if transition.extremum.op not in ("max", "min"):
        msg = (
            f"redistribute: no gradient is defined for the reduction of {transition.source.notation(local.dtype)}; "
            f"detach() the tensor first"
        )
        raise UnsupportedOperatorError(msg)
    reduced = functions.extremum.apply(local, transition, context)
    linear = transition.linear
    return reduced if linear.is_trivial else functions.linear.apply(reduced, linear, context)


def _run_adjoint(grad: Any, adjoint: Transition, context: _Context) -> Any:
    """Run an adjoint in backward, as a differentiable operation if the gradient itself needs a gradient."""
    platform = context.platform
    if context.on_backward is not None:
        context.on_backward()
    if not (platform.needs_grad(grad) and platform.grad_enabled()):
        return _run(grad, adjoint, context, "backward") if adjoint.steps else grad
    if adjoint.is_trivial:
        return grad
    again = context._replace(on_backward=None, phase="backward", defer=None)
    return _functions(platform).linear.apply(grad, adjoint, again)


def _run(local: Any, transition: Transition, context: _Context, phase: str = "") -> Any:
    """Check, notify the watchers, and apply all steps; ``phase`` is by default that of the context."""
    _check(local, transition, context.platform)
    if transition.communicates:
        _notify(local, transition, context, phase or context.phase)
    return _applied(local, transition, context.platform)


def _applied(local: Any, transition: Transition, platform: Platform) -> Any:
    """Apply all steps to ``local``."""
    steps = transition.steps
    if not steps:
        return local
    for step in steps:
        local = step.apply(local, platform)
    return platform.function_result(local)  # on some ranks the result is a view of a buffer


def _notify(local: Any, transition: Transition, context: _Context, phase: str) -> None:
    # Backward on an engine thread does not see the watchers of the program; those of the forward are notified then.
    notified = watchers() or context.watchers
    if notified:
        module = context.module or module_path()
        size = context.platform.itemsize(local)
        notify(notified, PendingRedistribution(transition, local.dtype, size, context.cause, module, phase))


def _check(local: Any, transition: Transition, platform: Platform) -> None:
    source, rank = transition.source, platform.transport().rank
    if rank == source.mesh.rank and local.shape == source.local_shape:
        if platform.has_tangent(local):
            msg = (
                f"redistribute: forward-mode differentiation cannot go through {source.notation(local.dtype)} -> "
                f"{transition.target.notation(local.dtype)}; differentiate backward, or backward twice as "
                "torch.autograd.functional.jvp does"
            )
            raise UnsupportedOperatorError(msg)
        return
    if rank != source.mesh.rank:
        msg = (
            f"redistribute: rank {rank} runs a transition that was planned on rank {source.mesh.rank}; "
            f"build the mesh on rank {rank}"
        )
        raise MeshError(msg)
    msg = (
        f"redistribute: rank {rank} holds a local tensor of shape {tuple(local.shape)}, but "
        f"{source.notation(local.dtype)} says it should be {source.local_shape}"
    )
    raise ShardMismatchError(msg)


def _functions(platform: Platform) -> _Functions:
    """Return the autograd functions of ``platform``, which are built once and kept on it."""
    functions: _Functions | None = platform.__dict__.get(_CACHE)
    if functions is None:
        with _LOCK:
            functions = platform.__dict__.get(_CACHE)
            if functions is None:
                base = platform.Function
                functions = _Functions(
                    _linear_function(base), _extremum_function(base), _gathered_function(base), _cast_function(base)
                )
                platform.__dict__[_CACHE] = functions
    return functions


def _linear_function(base: Any) -> Any:
    class RedistributeFunction(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Forward runs a transition; backward runs its adjoint."""

        @staticmethod
        def forward(ctx: Any, local: Any, transition: Transition, context: _Context) -> Any:
            """Run the transition."""
            ctx.transition, ctx.context = transition, context
            # Without steps nothing is checked here; the adjoint checks its own input.
            return _run(local, transition, context) if transition.steps else local

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
            """Run the adjoint, unless the gradient is deferred."""
            if ctx.context.defer is not None and ctx.context.defer(grad):
                return None, None, None
            return _run_adjoint(grad, ctx.transition.adjoint, ctx.context), None, None

    return RedistributeFunction


def _cast_function(base: Any) -> Any:
    class CastRedistributeFunction(base):  # type: ignore[misc] # as above
        """Forward and backward run a transition and its adjoint, each in a dtype of its own."""

        @staticmethod
        def forward(ctx: Any, local: Any, transition: Transition, context: _Context, dtypes: tuple[Any, Any]) -> Any:
            """Cast, and run the transition."""
            ctx.transition, ctx.context, ctx.gradient_dtype, ctx.dtype = transition, context, dtypes[1], local.dtype
            return _run(context.platform.tensor_type_cast(local, dtypes[0]), transition, context)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
            """Cast the gradient, run the adjoint, and cast its result to the dtype of the tensor."""
            cast = ctx.context.platform.tensor_type_cast
            reduced = _run_adjoint(cast(grad, ctx.gradient_dtype), ctx.transition.adjoint, ctx.context)
            return cast(reduced, ctx.dtype), None, None, None

    return CastRedistributeFunction


def _gathered_function(base: Any) -> Any:
    class GatheredViewFunction(base):  # type: ignore[misc] # as above
        """Forward returns the gathered value; backward runs the adjoint of the gather."""

        @staticmethod
        def forward(ctx: Any, source: Any, gathered: tuple[Any], transition: Transition, context: _Context) -> Any:
            """Return the value that was gathered before; ``source`` only ties the result to the graph."""
            del source
            ctx.transition, ctx.context = transition, context
            return context.platform.detach(gathered[0])  # detached from any graph but this function's

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
            """Run the adjoint, straight to the source."""
            return _run_adjoint(grad, ctx.transition.adjoint, ctx.context), None, None, None

    return GatheredViewFunction


def _extremum_function(base: Any) -> Any:
    class ExtremumFunction(base):  # type: ignore[misc] # as above
        """Reduces by max or min; the gradient goes to the ranks that hold the extremum, and ties share it evenly."""

        @staticmethod
        def forward(ctx: Any, local: Any, transition: Transition, context: _Context) -> Any:
            """All-reduce, and save where this rank holds the extremum."""
            step: AllReduce = transition.extremum  # type: ignore[assignment] # checked by the caller
            reduced = _run(local, Transition(transition.source, step.target, (), (step,)), context)
            ctx.transition, ctx.context = transition, context
            ctx.attained = context.platform.ones_like(local) * (local == reduced)
            return reduced

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
            """Return this rank's share of the gradient."""
            layout = ctx.transition.linear.adjoint.target
            # Each rank masks the gradient differently, so it varies along these axes; the adjoint sums over them.
            view = plan_transition(layout, layout, ctx.transition.extremum.axes)
            ties = _run(ctx.attained, view.adjoint, ctx.context, "backward")
            share = _run_adjoint(grad, view, ctx.context) / ties
            # Masked instead of multiplied by zero: a non-finite gradient must not reach ranks without the extremum.
            mask = ctx.attained == 0
            return ctx.context.platform.local_op("masked_fill")(x=share, mask=mask, value=0.0), None, None

    return ExtremumFunction

"""Running plans: forward is the plan's steps, backward is its adjoint's.

Where no gradient is needed there is no autograd node. Backward runs through the same door, so it is differentiable
the same way.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.dtensor.events import Occurrence, announce, module_path, watchers
from hyper_parallel.core.dtensor.transition import Transition, plan_transition
from hyper_parallel.errors import MeshError, ShardMismatchError, UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.dtensor.events import Cause, Watcher
    from hyper_parallel.core.dtensor.steps import AllReduce
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["gathered_view", "redistribute", "reduce_deferred"]

_LOCK = threading.Lock()
_CACHE = "_hyper_parallel_redistribution"


class _Call(NamedTuple):
    """What a run is for; kept from forward for backward."""

    platform: Platform
    cause: Cause | None
    module: str
    listening: tuple[Watcher, ...]
    passed: Callable[[], None] | None = None
    phase: str = "forward"
    keep: Callable[[Any], bool] | None = None


class _Functions(NamedTuple):
    """The platform's autograd functions."""

    linear: Any
    extremum: Any
    gathered: Any


def redistribute(
    local: Any,
    steps: Transition,
    platform: Platform,
    cause: Cause | None = None,
    passed: Callable[[], None] | None = None,
    keep: Callable[[Any], bool] | None = None,
) -> Any:
    """The local tensor in the plan's target layout, on the graph.

    Args:
        local: this rank's plain tensor in the plan's source layout.
        steps: from :func:`~hyper_parallel.core.dtensor.transition.plan`.
        platform: the framework of ``local``.
        cause: who asks, for the event log and ``strict()``; None is the program itself.
        passed: called when a gradient passes on its way back.
        keep: asked in backward whether it keeps the gradient for later; then nothing is sent back.

    Raises:
        ShardMismatchError: (a ValueError) ``local`` has not the shape that the source layout gives this rank.
        MeshError: the plan was made by another rank.
        UnsupportedOperatorError: a gradient is needed through Partial(prod), Partial(all) or Partial(any).
        StrictModeError: an implicit redistribution where ``strict()`` or ``implicit_budget()`` forbids it.
    """
    if not (platform.grad_enabled() and platform.needs_grad(local)) or not platform.is_floating(local):
        return _run(local, steps, _Call(platform, cause, "", ())) if steps.steps else local
    if steps.is_trivial:
        return local
    return _differentiable(local, steps, _Call(platform, cause, module_path(), watchers(), passed, keep=keep))


def gathered_view(
    source_local: Any,
    gathered_local: Any,
    steps: Transition,
    axes: Sequence[int],
    platform: Platform,
    passed: Callable[[], None] | None = None,
) -> Any:
    """``gathered_local`` again, for a consumer that differs along ``axes``; no communication in forward.

    Args:
        source_local: what ``steps`` started from.
        gathered_local: what it arrived at.
        steps: the plan between them.
        axes: mesh axes, replicated in the plan's target, along which the consumer's operands differ.
        platform: the framework of both.
        passed: called when a gradient passes on its way back.

    Returns:
        A tensor of the values of ``gathered_local`` whose gradient goes straight to ``source_local``: reduced and
        scattered in one collective instead of an all-reduce whose result is then sliced.
    """
    if not (platform.grad_enabled() and platform.needs_grad(source_local)):
        return gathered_local
    varying = plan_transition(steps.source, steps.target, axes)
    call = _Call(platform, None, module_path(), watchers(), passed)
    return _functions(platform).gathered.apply(source_local, platform.detach(gathered_local), varying, call)


def reduce_deferred(grad: Any, steps: Transition, platform: Platform, cause: Cause | None, module: str) -> Any:
    """A gradient that was kept, by the rest of its way; ``cause`` and ``module`` are those of the forward."""
    return _run(grad, steps, _Call(platform, cause, module, ()), "backward")


def _differentiable(local: Any, steps: Transition, call: _Call) -> Any:
    if steps.extremum is None:
        return _functions(call.platform).linear.apply(local, steps, call)
    if steps.extremum.op not in ("max", "min"):
        msg = (
            f"redistribute: no gradient passes the reduction of {steps.source.notation(local.dtype)}; "
            f"detach() the tensor first"
        )
        raise UnsupportedOperatorError(msg)
    reduced = _functions(call.platform).extremum.apply(local, steps, call)
    return reduced if steps.linear.is_trivial else _functions(call.platform).linear.apply(reduced, steps.linear, call)


def _resumed(grad: Any, steps: Transition, call: _Call) -> Any:
    """Run an adjoint in backward, as a differentiable operation where a second backward may come."""
    platform = call.platform
    if call.passed is not None:
        call.passed()
    if not (platform.needs_grad(grad) and platform.grad_enabled()):
        return _run(grad, steps, call, "backward") if steps.steps else grad
    if steps.is_trivial:
        return grad
    return _functions(platform).linear.apply(grad, steps, call._replace(passed=None, phase="backward", keep=None))


def _run(local: Any, steps: Transition, call: _Call, phase: str = "") -> Any:
    """Check, announce, and do all steps; ``phase`` is the call's unless it says another."""
    _check(local, steps, call.platform)
    if steps.communicates:
        _announce(local, steps, call, phase or call.phase)
    for step in steps.steps:
        local = step.apply(local, call.platform)
    return local


def _announce(local: Any, steps: Transition, call: _Call, phase: str) -> None:
    # A backward on an engine thread does not see the watchers of the program; forward's are then the ones meant.
    listening = watchers() or call.listening
    if listening:
        module = call.module or module_path()
        size = call.platform.itemsize(local)
        announce(listening, Occurrence(steps, local.dtype, size, call.cause, module, phase))


def _check(local: Any, steps: Transition, platform: Platform) -> None:
    source, rank = steps.source, platform.transport().rank
    if rank != source.mesh.rank:
        msg = f"redistribute: rank {rank} runs a plan that rank {source.mesh.rank} made; build the mesh on rank {rank}"
        raise MeshError(msg)
    if tuple(local.shape) != source.local_shape:
        msg = (
            f"redistribute: rank {rank} holds a local tensor of shape {tuple(local.shape)}, but "
            f"{source.notation(local.dtype)} gives it {source.local_shape}"
        )
        raise ShardMismatchError(msg)


def _functions(platform: Platform) -> _Functions:
    """The autograd functions of ``platform``, built once and kept on it."""
    found: _Functions | None = platform.__dict__.get(_CACHE)
    if found is None:
        with _LOCK:
            found = platform.__dict__.get(_CACHE)
            if found is None:
                base = platform.Function
                found = _Functions(_linear_function(base), _extremum_function(base), _gathered_function(base))
                platform.__dict__[_CACHE] = found
    return found


def _linear_function(base: Any) -> Any:
    class Redistribution(base):  # type: ignore[misc] # the framework's class is known at run time only
        """A plan forward, its adjoint backward."""

        @staticmethod
        def forward(ctx: Any, local: Any, steps: Transition, call: _Call) -> Any:
            """Run the plan."""
            ctx.steps, ctx.call = steps, call
            # A view moves nothing, and what its backward moves is checked then.
            return _run(local, steps, call) if steps.steps else local

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
            """Run the adjoint, unless the gradient is kept for later."""
            if ctx.call.keep is not None and ctx.call.keep(grad):
                return None, None, None
            return _resumed(grad, ctx.steps.adjoint, ctx.call), None, None

    return Redistribution


def _gathered_function(base: Any) -> Any:
    class GatheredView(base):  # type: ignore[misc] # as above
        """The gathered value forward, the plan's adjoint backward."""

        @staticmethod
        def forward(ctx: Any, source: Any, gathered: Any, steps: Transition, call: _Call) -> Any:  # noqa: ARG004 - tracked
            """The value as it was gathered before."""
            ctx.steps, ctx.call = steps, call
            return gathered

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
            """Straight to the source."""
            return _resumed(grad, ctx.steps.adjoint, ctx.call), None, None, None

    return GatheredView


def _extremum_function(base: Any) -> Any:
    class Extremum(base):  # type: ignore[misc] # as above
        """Reduction by max or min; the gradient goes to the ranks that attained it, ties share evenly."""

        @staticmethod
        def forward(ctx: Any, local: Any, steps: Transition, call: _Call) -> Any:
            """All-reduce, and remember where this rank attained the result."""
            head: AllReduce = steps.extremum  # type: ignore[assignment] # checked by the caller
            reduced = _run(local, Transition(steps.source, head.target, (), (head,)), call)
            ctx.steps, ctx.call = steps, call
            ctx.attained = call.platform.ones_like(local) * (local == reduced)
            return reduced

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
            """This rank's share of the gradient."""
            layout = ctx.steps.linear.adjoint.target
            # Every rank weighs the same gradient its own way: a varying use, whose adjoint is the sum.
            view = plan_transition(layout, layout, ctx.steps.extremum.axes)
            ties = _run(ctx.attained, view.adjoint, ctx.call, "backward")
            share = _resumed(grad, view, ctx.call) / ties
            # Selected, not multiplied: a gradient that is not finite must not reach ranks that lost.
            return ctx.call.platform.local_op("masked_fill")(x=share, mask=ctx.attained == 0, value=0.0), None, None

    return Extremum

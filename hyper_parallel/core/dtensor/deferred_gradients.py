"""Gradients left pending: ``defer_grad_reduce()`` reduces over several backward passes at once.

Inside the block, a replicated leaf enters an operation that differs along some axes as always, by a varying view. Only
the view's backward is another: it leaves this rank's summand with the leaf. What several passes leave is added up, and
reduced where the block ends. A leaf's local tensor carries its summands, so whoever shares it sees them.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.dtensor.events import module_path, watching
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.redistribute import redistribute, reduce_deferred
from hyper_parallel.core.dtensor.transition import dual, plan_transition
from hyper_parallel.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.dtensor.events import Cause, Occurrence
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "DeferredGradient",
    "add_deferred",
    "attach_deferred",
    "defer_grad_reduce",
    "deferral_hook",
    "deferred_of",
    "drop_deferred",
    "refuse_partial_step",
]

_PENDING = "_hyper_parallel_pending"


class DeferredGradient(NamedTuple):
    """What a leaf's gradient still owes.

    Attributes:
        layout: the dual of the leaf's layout, with Partial(sum) along the axes that are pending.
        summand: this rank's.
        cause: operator and argument that the leaf was used as, first.
        module: path of the module that did.
    """

    layout: Layout
    summand: Any
    cause: Cause | None
    module: str


class _Block:
    """The outermost open block of this thread or task; it listens, so that no view made outside serves inside."""

    def __init__(self) -> None:
        self.open = True
        self.left: dict[int, tuple[Any, Layout, Platform]] = {}  # leaves with summands, in the order of the first

    def hear(self, occurrence: Occurrence) -> None:
        """Nothing to note."""

    def reduce(self) -> None:
        """One reduction per leaf, and its gradient is the true one."""
        for local, layout, platform in self.left.values():
            held = deferred_of(local)
            if held is not None:
                reduced = reduce_deferred(
                    held.summand, plan_transition(held.layout, layout), platform, held.cause, held.module
                )
                drop_deferred(local)
                platform.accumulate_grad(local, reduced)


_BLOCK: ContextVar[_Block | None] = ContextVar("hyper_parallel_deferring", default=None)


@contextmanager
def defer_grad_reduce() -> Iterator[None]:
    """Inside, gradients of replicated parameters stay ``Partial``; where the block ends each is reduced, once.

    For gradient accumulation: N backward passes inside cost the reductions of one. Values are the same. What is
    deferred is the all-reduce of a parameter's gradient. Shards that are gathered reduce and scatter theirs at each
    pass, and a parameter with hooks reduces its own, because they see true gradients. In an inner block nothing is
    reduced: the outermost counts.

    On PyTorch ``parameter.grad`` is a ``Partial`` DTensor inside. On MindSpore, where gradients are values,
    ``hyper_parallel.value_and_grad`` returns them ``Partial`` inside: add them up, and say ``reduce_partial()`` once.

    Blocks that an exception leaves communicate nothing. An optimizer's step on a gradient that is still ``Partial`` is
    an error that names the parameter.
    """
    if _BLOCK.get() is not None:
        yield
        return
    block = _Block()
    token = _BLOCK.set(block)
    try:
        with watching(block):
            yield
    finally:
        block.open = False
        _BLOCK.reset(token)
    block.reduce()


def deferred_of(local: Any) -> DeferredGradient | None:
    """What the gradient of the leaf ``local`` owes, or None."""
    found: DeferredGradient | None = getattr(local, _PENDING, None)
    return found


def attach_deferred(local: Any, pending: DeferredGradient) -> None:
    """Let the leaf ``local`` owe it."""
    setattr(local, _PENDING, pending)


def drop_deferred(local: Any) -> None:
    """Forget it: it was reduced, replaced or cleared."""
    if hasattr(local, _PENDING):
        delattr(local, _PENDING)


def deferral_hook(tensor: DTensor, varying: tuple[int, ...], cause: Cause | None) -> Callable[[Any], bool] | None:
    """What a varying view asks in backward: True when the gradient was kept and nothing is to be sent back.

    None where there is nothing to defer: no block is open, or ``tensor`` is no replicated parameter.
    """
    block = _BLOCK.get()
    if block is None:
        return None
    local, layout, platform = tensor._local, tensor._layout, tensor._platform  # noqa: SLF001 - the class' own room
    if layout.partials or not platform.is_parameter(tensor):
        return None
    axes = [axis for axis in varying if layout.mesh.shape[axis] > 1]
    if not axes:
        return None
    true = dual(layout)
    owed = Layout.of(layout.mesh, layout.dim_axes, [(axis, "sum") for axis in axes], layout.shape)
    module = module_path()

    def keep(grad: Any) -> bool:
        # Backward of a graph that outlived its block, or that is differentiated again, reduces at once.
        differentiated = platform.needs_grad(grad) and platform.grad_enabled()
        if not block.open or differentiated or not platform.accumulates_grad(local):
            return False
        more = add_deferred(deferred_of(local), DeferredGradient(owed, grad, cause, module), platform)
        attach_deferred(local, more)
        block.left.setdefault(id(local), (local, true, platform))
        return True

    return keep


def add_deferred(held: DeferredGradient | None, more: DeferredGradient, platform: Platform) -> DeferredGradient:
    """The sum of both; summands of one's axes are summands of all axes, when one rank holds them and others zeros."""
    if held is None:  # backward may hand the same tensor to others
        return more._replace(summand=platform.local_op("clone")(more.summand, memory_format=None))
    first, second = held.layout, more.layout
    if first is not second:
        axes = sorted({axis for axis, _ in (*first.partials, *second.partials)})
        first = Layout.of(first.mesh, first.dim_axes, [(axis, "sum") for axis in axes], first.shape)
    mine, other = (_spread(one, first, platform) for one in (held, more))
    return held._replace(layout=first, summand=mine + other)


def refuse_partial_step(name: str, layout: Layout, dtype: object, held: DeferredGradient | None = None) -> None:
    """An optimizer's step on a gradient that is one rank's summand would part the replicas.

    Args:
        name: of the parameter.
        layout: of its gradient.
        dtype: of its gradient.
        held: what the gradient owes, where that is known.

    Raises:
        LayoutError: something is pending.
    """
    if layout.partials:
        cause, module = (None, "") if held is None else (held.cause, held.module)
        used = f" ({cause.argument} of {cause.op}{f' in {module}' if module else ''})" if cause else ""
        msg = (
            f"optimizer step: the gradient of {name}{used} is still {layout.notation(dtype)}; step after "
            "defer_grad_reduce() has ended, or reduce it first: grad = grad.reduce_partial()"
        )
        raise LayoutError(msg)


def _spread(one: DeferredGradient, layout: Layout, platform: Platform) -> Any:
    return redistribute(one.summand, plan_transition(one.layout, layout), platform)

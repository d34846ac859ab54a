"""Deferred gradients: ``defer_grad_reduce()`` reduces the gradients of several backward passes at once.

Operators read a replicated leaf through a varying view, whose gradient is Partial along the axes on which the other
operands differ. Inside the block only the backward of that view changes: it keeps this rank's partial gradient on the
leaf's local tensor. The partial gradients of several passes are added, and reduced at the end of the block. All
DTensors over one local tensor share its deferred gradient.
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
    from hyper_parallel.core.dtensor.events import Cause, PendingRedistribution
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "DeferredGradient",
    "add_deferred",
    "check_step_gradient",
    "clear_deferred",
    "defer_grad_reduce",
    "deferral_hook",
    "get_deferred",
    "set_deferred",
]

_DEFERRED = "_hyper_parallel_deferred_gradient"


class DeferredGradient(NamedTuple):
    """The part of a leaf's gradient that is still to be reduced.

    Attributes:
        layout: the dual of the leaf's layout, with Partial(sum) along the axes still to be reduced.
        partial_value: this rank's partial gradient, a plain tensor.
        cause: operator and argument of the leaf's first use.
        module: path of the module of that use.
    """

    layout: Layout
    partial_value: Any
    cause: Cause | None
    module: str


class _Block:
    """The outermost open block of a thread or task.

    It is also registered as a watcher: varying views are cached per set of watchers, so no view made outside the block
    is used inside.
    """

    def __init__(self) -> None:
        self.open = True
        # Leaves with deferred gradients by identity, in the order of their first gradient.
        self.leaves: dict[int, tuple[Any, Layout, Platform]] = {}

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Do nothing."""

    def reduce(self) -> None:
        """Reduce the gradient of every leaf once, and add it to the leaf's own gradient."""
        for local, layout, platform in self.leaves.values():
            deferred = get_deferred(local)
            if deferred is not None:
                transition = plan_transition(deferred.layout, layout)
                reduced = reduce_deferred(deferred.partial_value, transition, platform, deferred.cause, deferred.module)
                clear_deferred(local)
                platform.accumulate_grad(local, reduced)


_BLOCK: ContextVar[_Block | None] = ContextVar("hyper_parallel_deferring", default=None)


@contextmanager
def defer_grad_reduce() -> Iterator[None]:
    """Keep gradients of replicated parameters ``Partial`` inside the block, and reduce each once at its end.

    Use it for gradient accumulation: N backward passes then communicate as much as one, and the gradients are the same.
    Only the all-reduce of a parameter's gradient is deferred. A sharded parameter that is gathered for use reduces and
    scatters its gradient in each pass. A parameter with hooks is reduced in each pass too, because hooks must see
    reduced gradients. An inner block does nothing; the outermost block reduces.

    On PyTorch ``parameter.grad`` is a ``Partial`` DTensor inside the block. On MindSpore, which returns gradients
    instead of storing them, ``hyper_parallel.value_and_grad`` returns them ``Partial`` inside the block: add them up
    and call ``reduce_partial()`` once.

    If the block raises, nothing is communicated. An optimizer step on a gradient that is still ``Partial`` raises an
    error that names the parameter.
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


def get_deferred(local: Any) -> DeferredGradient | None:
    """Return the deferred gradient of the leaf ``local``, or None."""
    deferred: DeferredGradient | None = getattr(local, _DEFERRED, None)
    return deferred


def set_deferred(local: Any, deferred: DeferredGradient) -> None:
    """Attach a deferred gradient to the leaf ``local``."""
    setattr(local, _DEFERRED, deferred)


def clear_deferred(local: Any) -> None:
    """Remove the deferred gradient of the leaf ``local``: it was reduced, replaced or cleared."""
    if hasattr(local, _DEFERRED):
        delattr(local, _DEFERRED)


def deferral_hook(tensor: DTensor, varying: tuple[int, ...], cause: Cause | None) -> Callable[[Any], bool] | None:
    """Return the hook that defers gradients of a varying view of ``tensor``, or None if there is nothing to defer.

    Args:
        tensor: the leaf; only a replicated parameter, in an open block, has anything to defer.
        varying: mesh axes along which the other operands of the consumer differ.
        cause: operator and argument of the use.

    Returns:
        a function of the gradient that returns True if it has kept the gradient; autograd then passes none on.
    """
    block = _BLOCK.get()
    if block is None:
        return None
    local, layout, platform = tensor._local, tensor._layout, tensor._platform
    if layout.partials or not platform.is_parameter(tensor):
        return None
    axes = [axis for axis in varying if layout.mesh.shape[axis] > 1]
    if not axes:
        return None
    reduced = dual(layout)
    partial = Layout.of(layout.mesh, layout.dim_axes, [(axis, "sum") for axis in axes], layout.shape)
    module = module_path()

    def defer(grad: Any) -> bool:
        # A backward that runs after the block has ended, or with create_graph, reduces at once.
        differentiated = platform.needs_grad(grad) and platform.grad_enabled()
        if not block.open or differentiated or not platform.accumulates_grad(local):
            return False
        total = add_deferred(get_deferred(local), DeferredGradient(partial, grad, cause, module), platform)
        set_deferred(local, total)
        block.leaves.setdefault(id(local), (local, reduced, platform))
        return True

    return defer


def add_deferred(first: DeferredGradient | None, second: DeferredGradient, platform: Platform) -> DeferredGradient:
    """Return the sum of two deferred gradients, Partial along the axes of both.

    If their axes differ, each is first made Partial along the missing axes: one rank keeps the value, and the others
    hold zeros.
    """
    if first is None:  # autograd may pass the same tensor to other nodes
        return second._replace(partial_value=platform.local_op("clone")(second.partial_value, memory_format=None))
    layout, other = first.layout, second.layout
    if layout is not other:
        axes = sorted({axis for axis, _ in (*layout.partials, *other.partials)})
        layout = Layout.of(layout.mesh, layout.dim_axes, [(axis, "sum") for axis in axes], layout.shape)
    values = [
        redistribute(deferred.partial_value, plan_transition(deferred.layout, layout), platform)
        for deferred in (first, second)
    ]
    return first._replace(layout=layout, partial_value=values[0] + values[1])


def check_step_gradient(name: str, layout: Layout, dtype: object, deferred: DeferredGradient | None = None) -> None:
    """Raise if an optimizer would step on a partial gradient, which would make replicas differ.

    Args:
        name: the parameter's name.
        layout: layout of its gradient.
        dtype: dtype of its gradient.
        deferred: the parameter's deferred gradient, if it is known.

    Raises:
        LayoutError: the gradient is Partial.
    """
    if layout.partials:
        cause, module = (None, "") if deferred is None else (deferred.cause, deferred.module)
        used = f" ({cause.argument} of {cause.op}{f' in {module}' if module else ''})" if cause else ""
        msg = (
            f"optimizer step: the gradient of {name}{used} is still {layout.notation(dtype)}; step after "
            "defer_grad_reduce() has ended, or reduce it first: grad = grad.reduce_partial()"
        )
        raise LayoutError(msg)

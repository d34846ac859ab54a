"""Keeps strides and view semantics equal across ranks if a shard has at most one element along a dim.

A framework decides from local sizes whether a result is a view and in which order its dims are stored. All ranks must
get what the global tensor would get. Otherwise a write through a view would change the base on some ranks only, and
autograd graphs would differ, so that ranks would wait for collectives that others never call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import rebuild
from hyper_parallel.core.dtensor.dtensor import DTensor

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.shard.entry import Run
    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["copy_if_any_rank_copies", "has_empty_shard", "is_thin", "preserve_global_memory_format"]


def has_empty_shard(plan: OpPlan) -> bool:
    """Whether any local shard of an operand or of an output is empty."""
    layouts = (*plan.choice.targets, *plan.choice.outputs)
    return any(0 in layout.local_shape for layout in layouts if layout.shape is not None)


def is_thin(layout: Layout) -> bool:
    """Whether this rank has at most one element along a dim that is longer globally."""
    if layout.shape is None:
        return False
    return any(size <= 1 and size < total for size, total in zip(layout.local_shape, layout.shape, strict=True))


def preserve_global_memory_format(platform: Platform, plan: OpPlan, call: Run, operands: Sequence[Run]) -> Run:
    """Return ``call`` with outputs stored in the memory format (order of dims) of the global output.

    A shard of length 0 or 1 along a dim is contiguous in several formats, and the framework picks the default one.
    Ranks with more elements keep the operands' format. Otherwise a later view would be a copy on some ranks only.

    Args:
        platform: the framework.
        plan: the plan of an elementwise call.
        call: the local call.
        operands: reads each tensor from the caller's arguments.
    """
    store = platform.storing_like(
        plan.choice.outputs[0].local_shape,
        [layout.shape for layout in plan.choice.targets],  # type: ignore[misc] # an elementwise rule knows its shapes
        [target is operand.layout for target, operand in zip(plan.choice.targets, plan.call.operands, strict=True)],
    )

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(args, kwargs)
        if out is NotImplemented:
            return out
        locals_ = []
        for operand in operands:
            tensor = operand(args, kwargs)
            local = tensor._local if isinstance(tensor, DTensor) else tensor
            if out is local:
                return out
            locals_.append(local)
        return rebuild(out, [store(part, locals_) for part in out]) if plan.many else store(out, locals_)

    return run


def copy_if_any_rank_copies(platform: Platform, plan: OpPlan, call: Run, operand: Run) -> Run:
    """Return the view ``call``, but copy its result if the global tensor could not be viewed like this.

    Args:
        platform: the framework.
        plan: the plan of the view; it redistributes nothing.
        call: the local call.
        operand: reads the tensor to be viewed from the caller's arguments.
    """
    shape, target = plan.choice.targets[0].shape, plan.choice.outputs[0].shape

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(args, kwargs)
        may_share = platform.can_view(operand(args, kwargs)._local, shape, target)  # type: ignore[arg-type] # known
        return out if may_share else platform.dense_copy(out)

    return run

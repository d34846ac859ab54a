"""Operators on ranks outside of the mesh of their operands: they compute nothing and communicate nothing.

A program that runs on all ranks also calls operators on tensors of a smaller mesh. On ranks outside of that mesh the
results have no elements, but the same shape, dtype, placements and graph as on its ranks. The plan of the mesh's first
rank, run on tensors without storage, provides these. Random calls advance the random stream as on that rank, so that
later random calls on a mesh of all ranks agree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import rebuild
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.executor import TensorArgument, local_call, with_shape_check
from hyper_parallel.core.shard.op_plan import describe, plan_call
from hyper_parallel.core.shard.rule import OpCall, Rule
from hyper_parallel.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.shard.entry import OpEntry, Run
    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["outside_of_mesh"]


def outside_of_mesh(
    platform: Platform,
    entry: OpEntry,
    call: OpCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: Sequence[TensorArgument],
) -> Run:
    """Return a closure over the caller's arguments that returns DTensors without local elements.

    Args:
        platform: the framework.
        entry: the dispatch entry.
        call: the call, with layouts on the mesh that this rank is outside of.
        args: the caller's positional arguments with tensors marked.
        kwargs: the keyword arguments, in the same form.
        marks: the marks in the order of the call's operands.

    Raises:
        MeshLookupError: the sizes of the results depend on values, which this rank does not have.
    """
    rule: Rule = entry.rule  # type: ignore[assignment] # decompositions are not compiled
    first = call.mesh.for_rank(call.mesh.ranks[0])
    operands = tuple(replace(operand, layout=_on(first, operand.layout)) for operand in call.operands)
    plan = plan_call(OpCall(call.op, first, operands, call.args), rule, in_place=entry.in_place)
    if plan.open:
        call.mesh.own_coordinate()

    def run(args_now: tuple[Any, ...], kwargs_now: dict[str, Any]) -> Any:
        entered: list[tuple[Any, Any]] = []
        fetches = {id(mark): _without_storage(platform, plan, i, entered) for i, mark in enumerate(marks)}
        local = local_call(platform, entry, plan, args, kwargs, marks, fetches)
        outs = with_shape_check(local, plan)(args_now, kwargs_now)
        if entry.in_place:
            _refuse_recorded_write(platform, plan, entered)
            return entry.target(args_now, kwargs_now)
        layouts = plan.choice.outputs
        results = [
            _result(platform, out, _on(call.mesh, layout.with_shape(layout.get_global_shape(out.shape))), entered)
            for out, layout in zip(outs if plan.many else (outs,), layouts, strict=True)
        ]
        return rebuild(outs, results) if plan.many else results[0]

    return run


def _on(mesh: DeviceMesh, layout: Layout) -> Layout:
    """The layout of equal placements and shape as another rank sees its mesh."""
    return Layout.of(mesh, layout.dim_axes, layout.partials, layout.shape)


def _without_storage(
    platform: Platform, plan: OpPlan, index: int, entered: list[tuple[Any, Any]]
) -> Callable[[Any], Any]:
    """Return the function that makes operand ``index`` of the local call, and adds it to ``entered``."""
    shape = plan.choice.targets[index].local_shape

    def fetch(tensor: Any) -> Any:
        own = tensor._local if isinstance(tensor, DTensor) else tensor
        stand_in = platform.zeros(shape, dtype=own.dtype, device=platform.meta_device)
        if platform.needs_grad(own):
            platform.set_tensor_requires_grad(stand_in)
        entered.append((stand_in, tensor))
        return stand_in

    return fetch


def _refuse_recorded_write(platform: Platform, plan: OpPlan, entered: list[tuple[Any, Any]]) -> None:
    """Refuse a write that autograd records: nothing is written here, so the graph would lack it."""
    if platform.grad_enabled() and any(platform.needs_grad(stand_in) for stand_in, _ in entered):
        msg = (
            f"{describe(plan.call)}: rank {platform.transport().rank} is outside of the mesh, where a write that needs "
            "a gradient is not recorded; use the out-of-place form, or torch.no_grad()"
        )
        raise UnsupportedOperatorError(msg)


def _result(platform: Platform, out: Any, layout: Layout, entered: list[tuple[Any, Any]]) -> Any:
    """The DTensor without elements for ``out``; the operand itself if the local call returned that."""
    for stand_in, tensor in entered:
        if out is stand_in:
            return tensor
    local = platform.zeros(layout.local_shape, dtype=out.dtype, device=layout.mesh.device_type)
    if platform.needs_grad(out):
        needing = [tensor._local for stand_in, tensor in entered if platform.needs_grad(stand_in)]
        sources = [platform.reshape(source, (-1,)) for source in needing]
        local = platform.reshape(platform.tensor_type_cast(reduce(add, sources), out.dtype), layout.local_shape)
    return platform.wrap(local, layout)

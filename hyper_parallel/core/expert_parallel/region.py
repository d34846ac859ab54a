"""``routed_experts``: sends tokens to their experts, computes, and sends the results back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import to_local
from hyper_parallel.core.expert_parallel.layouts import RegionLayouts, region_layouts
from hyper_parallel.core.expert_parallel.plan import DispatchPlan, expert_capacity, local_routing, plan_dispatch
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["routed_experts"]

_NO_ROWS = "hyper_parallel_no_rows"


def routed_experts(
    x: Any,
    experts: Any,
    weights: Any,
    parameters: Sequence[Any],
    compute: Callable[..., Any],
    *,
    capacity_factor: float | None = None,
    partial_sums: bool = False,
) -> Any:
    """Send each token to its chosen experts and return the weighted sum of what they compute.

    ::

        x        [T@tokens, D]    experts, weights   [T@tokens, k]    parameters   [E@ep, ...]
        rows     sorted by expert, exchanged over ep by an uneven all-to-all
        y        [T@tokens, F]    y[t] = sum over j of weights[t, j] * compute(x[t], *parameters[experts[t, j]])

    The same call works on plain tensors, on one device. As DTensors, ``x``, ``experts`` and ``weights`` are sharded by
    tokens (dim 0) over one axis or more, and all parameters by experts (dim 0) over one of these. The numbers of
    experts and tokens need not be divisible by the sizes of the axes. Gradients are those of one device; an expert
    without tokens has gradient zero. The rows of an expert are in the order of global tokens, so sums over them are
    accumulated in the same order as on one device.

    Args:
        x: tokens [T, D], floating.
        experts: chosen experts, integers [T, k] in ``range(E)``.
        weights: weights of the choices, [T, k], floating.
        parameters: stacked weights of the experts, [E, ...] each, at least one.
        compute: ``compute(rows, *own)`` is one expert, with rows [R, D] and its own slice of each parameter; returns
            [R, F]. R may be 0. On MindSpore it is at least 1: a rank without tokens computes a row of ones to find the
            shape. Each row of the result must depend on its own row of ``rows`` only.
        capacity_factor: an expert accepts at most ``ceil(T * k * capacity_factor / E)`` assignments of the global
            batch, the first in the order of global tokens; the others contribute zero. With None it accepts all
            (dropless).
        partial_sums: accept axes along which tokens are replicated and every parameter is sharded by a dim other than
            that of experts (tensor parallelism inside an expert: columns of the first matrix, rows of the second).
            ``compute`` must then return this rank's term of the sum. Add a bias outside, since each rank would add it.

    Returns:
        [T, F], with the layout of ``x``, and ``Partial()`` on the axes of ``partial_sums``.

    Raises:
        PlanError: (a ValueError) shapes do not match, experts are out of range, or the capacity factor is invalid; if
            experts are out of range on one rank, all ranks of the axis raise it.
        LayoutError: (a ValueError) layouts other than those above; the message contains the line that fixes it.
    """
    platform = platform_of_argument(x, "routed_experts: x")
    count = _check_shapes(x, experts, weights, parameters)
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        msg = f"routed_experts: capacity_factor is {capacity_factor!r}; it must be a finite number above 0, or None"
        raise PlanError(msg)
    layouts = region_layouts(x, experts, weights, parameters, partial_sums=partial_sums)
    local_x, local_weights, local_parameters = layouts.enter(x, weights, parameters)
    choices = platform.tensor_to_numpy(platform.detach(to_local(experts)))
    capacity = None
    if capacity_factor is not None:
        capacity = expert_capacity(int(x.shape[0]) * int(experts.shape[1]), count, capacity_factor)
    plan = _agreed_plan(platform, layouts, choices, count, capacity)
    rows = _take(platform, _repeated(platform, local_x, choices.shape[1]), plan.sent)
    returned = _at_experts(platform, layouts, plan, rows, local_parameters, compute)
    return layouts.leave(_weighted_sum(platform, plan, returned, local_weights), x)


def _agreed_plan(
    platform: Platform, layouts: RegionLayouts, choices: Any, num_experts: int, capacity: int | None
) -> DispatchPlan:
    """Exchange the counts per expert and plan the dispatch.

    Counts are exchanged between the ranks of the expert axis; with a capacity, between all ranks that hold tokens.
    """
    wrong = int(((choices < 0) | (choices >= num_experts)).sum())
    own = local_routing(np.clip(choices, 0, num_experts - 1), num_experts)
    ranks = layouts.counted_ranks(capacity is not None)
    shared = [(own.counts, wrong)]
    if len(ranks) > 1:
        shared = platform.transport().all_gather_object(shared[0], ranks)
    outside = [f"rank {rank}: {bad}" for rank, (_, bad) in zip(ranks, shared, strict=True) if bad]
    if outside:
        msg = f"routed_experts: experts has values outside of range({num_experts}) ({'; '.join(outside)})"
        raise PlanError(msg)
    members = [ranks.index(rank) for rank in layouts.expert_ranks]
    counts, bounds = [counts for counts, _ in shared], layouts.expert_bounds(num_experts)
    return plan_dispatch(own, counts, ranks.index(layouts.rank), members, bounds, capacity)


def _at_experts(
    platform: Platform, layouts: RegionLayouts, plan: DispatchPlan, rows: Any, parameters: Sequence[Any], compute: Any
) -> Any:
    """Send the rows to their experts, compute, and return the results in the order of ``rows``."""
    ranks = layouts.expert_ranks
    if len(ranks) == 1:
        return _computed(platform, rows, plan.counts, parameters, compute)
    exchange = platform.differentiable_all_to_all_single
    arrived = exchange(rows, plan.input_splits, plan.output_splits, ranks)
    results = _computed(platform, _take(platform, arrived, plan.by_expert), plan.counts, parameters, compute)
    return exchange(_take(platform, results, plan.by_source), plan.output_splits, plan.input_splits, ranks)


def _computed(platform: Platform, rows: Any, counts: Sequence[int], parameters: Sequence[Any], compute: Any) -> Any:
    """Return the experts' results, concatenated; ``rows`` are sorted by expert."""
    if platform.empty_sums_are_uninitialized and not any(counts):
        return _of_no_rows(platform, rows, parameters, compute)
    if not counts:
        return compute(rows, *[_no_expert(platform, stacked) for stacked in parameters])
    unbind = platform.local_op("unbind")
    stacks = [unbind(x=stacked, dim=0) for stacked in parameters]
    results, start = [], 0
    for expert, size in enumerate(counts):
        if platform.empty_sums_are_uninitialized and not size:
            continue
        own_rows = platform.narrow(rows, 0, start, size)
        results.append(compute(own_rows, *[stack[expert] for stack in stacks]))
        start += size
    return platform.cat(results, 0)


def _of_no_rows(platform: Platform, rows: Any, parameters: Sequence[Any], compute: Any) -> Any:
    """Return the result of ``compute`` for zero rows, on the graph of all tensors; their gradients are zeros."""
    device = platform.device_of(rows)
    row = platform.ones((1, int(rows.shape[1])), dtype=rows.dtype, device=device)
    own = [platform.zeros(tuple(stacked.shape)[1:], dtype=stacked.dtype, device=device) for stacked in parameters]
    width = int(compute(row, *own).shape[1])
    return _no_rows_function(platform).apply(
        platform.zeros((0, width), dtype=rows.dtype, device=device), rows, *parameters
    )


def _no_rows_function(platform: Platform) -> Any:
    """Return the framework's custom autograd function: ``apply(result, *tensors)``."""
    cached = vars(platform).get(_NO_ROWS)
    return vars(platform).setdefault(_NO_ROWS, _make_no_rows(platform)) if cached is None else cached


def _make_no_rows(platform: Platform) -> Any:
    base: Any = platform.Function

    class NoRows(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Attaches a result without rows to the graph of tensors, whose gradients are zeros."""

        @staticmethod
        def forward(ctx: Any, result: Any, *tensors: Any) -> Any:
            """Return zeros in the shape of ``result``, which has no elements."""
            ctx.save_for_backward(*tensors)
            return platform.zeros_like(result)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
            """Return zeros for every tensor."""
            del grad
            return (None, *(platform.zeros_like(tensor) for tensor in ctx.saved_tensors))

    return NoRows


def _no_expert(platform: Platform, stacked: Any) -> Any:
    """Return zeros in the shape of one expert's parameter, for a rank without experts.

    They are attached to the graph of the empty parameter, so that this rank takes part in the exchanges of backward.
    """
    zeros = platform.zeros(tuple(stacked.shape)[1:], dtype=stacked.dtype, device=platform.device_of(stacked))
    return zeros + stacked.sum()


def _weighted_sum(platform: Platform, plan: DispatchPlan, returned: Any, weights: Any) -> Any:
    """Return the weighted sum over each token's choices; a dropped choice counts as zero."""
    width = int(returned.shape[1])
    if plan.drops:
        zero = platform.zeros((1, width), dtype=returned.dtype, device=platform.device_of(returned))
        returned = platform.cat([returned, zero], 0)
    tokens, choices = weights.shape
    by_choice = platform.reshape(_take(platform, returned, plan.slots), (tokens, choices, width))
    return (by_choice * platform.reshape(weights, (tokens, choices, 1))).sum(1)


def _repeated(platform: Platform, x: Any, times: int) -> Any:
    """Return each row ``times`` times, so that every assignment has its own; gradients add up in a fixed order."""
    tokens, width = x.shape
    return platform.reshape(platform.cat([x] * times, 1), (tokens * times, width))


def _take(platform: Platform, rows: Any, positions: Any) -> Any:
    index = platform.from_numpy(positions, device=platform.device_of(rows))
    return platform.local_op("index_select")(x=rows, dim=0, index=index)


def _check_shapes(x: Any, experts: Any, weights: Any, parameters: Sequence[Any]) -> int:
    """Check that the shapes match, and return the number of experts."""
    shapes = [tuple(tensor.shape) for tensor in (x, experts, weights)]
    fits = all(len(shape) == 2 for shape in shapes)
    if not fits or shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0] or not shapes[1][1]:
        msg = (
            f"routed_experts: x is {list(shapes[0])}, experts {list(shapes[1])}, weights {list(shapes[2])}; they must "
            "be [T, D], [T, k] and [T, k] with k of at least 1; flatten batch and sequence first"
        )
        raise PlanError(msg)
    counts = {int(stacked.shape[0]) if len(stacked.shape) else 0 for stacked in parameters}
    if len(counts) != 1 or 0 in counts:
        msg = (
            f"routed_experts: parameters are {[list(stacked.shape) for stacked in parameters]}; each must be "
            "[E, ...], with the same number of experts E"
        )
        raise PlanError(msg)
    return counts.pop()

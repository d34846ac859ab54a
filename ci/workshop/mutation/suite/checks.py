"""The checks that must notice mutants of the library's code: scenarios, functions, redistribution, costs.

A scenario is a test of the dispatcher that runs on every rank. Scenarios that notice most mutants come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.checker.redistribution import first_wrong
from hyper_parallel.verify.simulate import simulate
from workshop.mutation.suite.costs import (
    Costs,
    choice_costs,
    late_plans,
    plan_costs,
    search_efforts,
)
from workshop.mutation.suite.fixture import Fixture
from workshop.mutation.suite.gradients import (
    gathered_values_send_gradients_straight_back,
    gradients_are_differentiable,
    kept_views_serve_until_written,
    moves_are_recorded_and_forbidden,
    plans_are_kept_and_bounded,
    reductions_need_no_gradient,
    views_of_a_framework_that_loses_writes,
    what_gathers_is_known,
)
from workshop.mutation.suite.plan_cache import (
    canonical_operators_by_name,
    dtypes_are_in_the_key_where_they_count,
    failures_leave_no_plan,
    keys_tell_values_apart,
    locals_come_in_their_containers,
    numbers_share_a_plan,
    operands_are_counted_as_the_rule_names_them,
    operands_stand_anywhere,
    plans_are_bounded,
    plans_are_found_again,
    python_operators_answer_like_dispatch,
    signatures,
)
from workshop.mutation.suite.results import (
    constants_meet_distributed_tensors,
    dispatch_is_skipped,
    local_calls_that_differ,
    outputs_that_only_the_call_tells,
    several_outputs,
    shards_that_are_contiguous_by_chance,
    the_operand_itself,
    views_write_through_or_are_read_only,
    whole_layouts_as_answers,
    writes_return_what_is_written,
)
from workshop.mutation.suite.strategy_choice import (
    axes_keep_their_order,
    moves_have_prices,
    options_are_compared,
    rows_state_conditions,
    writes_stay_where_they_are,
)

__all__ = ["FUNCTIONS", "MODULE_CHECKS", "SCENARIOS", "Check", "TensorFunction", "function_differences", "keep_costs"]

Check = Callable[[], Iterator[str]]
"""Yields failures; empty texts and no text at all mean that everything holds."""

_PLATFORM = "torch"

SCENARIOS: tuple[Callable[[Fixture], None], ...] = (
    operands_stand_anywhere, numbers_share_a_plan, local_calls_that_differ, several_outputs, keys_tell_values_apart,
    plans_are_found_again, dtypes_are_in_the_key_where_they_count, failures_leave_no_plan, plans_are_bounded,
    locals_come_in_their_containers, python_operators_answer_like_dispatch, canonical_operators_by_name, signatures,
    operands_are_counted_as_the_rule_names_them,
    dispatch_is_skipped, constants_meet_distributed_tensors, outputs_that_only_the_call_tells, whole_layouts_as_answers,
    writes_return_what_is_written, views_write_through_or_are_read_only, the_operand_itself,
    moves_are_recorded_and_forbidden, kept_views_serve_until_written, gradients_are_differentiable,
    gathered_values_send_gradients_straight_back, reductions_need_no_gradient, views_of_a_framework_that_loses_writes,
    shards_that_are_contiguous_by_chance, rows_state_conditions, axes_keep_their_order, writes_stay_where_they_are,
    what_gathers_is_known, plans_are_kept_and_bounded,
    moves_have_prices, options_are_compared,
)  # fmt: skip


@dataclass(frozen=True)
class TensorFunction:
    """A function that is compared on plain tensors and on DTensors.

    Attributes:
        name: for the report.
        call: takes canonical operators, then the tensors.
        shapes: of the tensors.
    """

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, *tensors: Any) -> Any:
        """Call the function on plain tensors or DTensors."""
        return self.call(platform_named("torch").dispatcher.ops, *tensors)


FUNCTIONS = (
    TensorFunction("operators and numbers", lambda _, x, y: (2.0 * x - y / 3 + 1) * (x > 0), ((5, 3), (5, 3))),
    TensorFunction("broadcast", lambda _, x, y: x * y - y, ((5, 3), (1, 3))),
    TensorFunction("one tensor twice", lambda _, x: x * x + x.add(x, alpha=2), ((5, 3),)),
    TensorFunction("matmul", lambda _, x, y: x @ y, ((5, 3), (3, 4))),
    TensorFunction("linear", lambda ops, x, w, b: ops.linear(x, w, bias=b), ((5, 3), (4, 3), (4,))),
    TensorFunction("layer_norm", lambda ops, x, w, b: ops.layer_norm(x, (3,), w, b), ((5, 3), (3,), (3,))),
    TensorFunction(
        "softmax and sums", lambda _, x: x.softmax(-1).sum(dim=1) + x.sum(1, keepdim=True).mean(), ((5, 4),)
    ),
    TensorFunction("cat and split", lambda ops, x, y: ops.cat([x, y, x], dim=0).split([4, 5], dim=0), ((3, 2), (3, 2))),
    TensorFunction("views", lambda _, x: x.view(2, 3, 5).transpose(0, 2)[1:4, 0].reshape(-1), ((6, 5),)),
    TensorFunction("in place", lambda _, x: (x * 1.0).mul_(2.0).add_(x), ((5, 3),)),
    TensorFunction("extrema", lambda _, x: next(iter(x.max(dim=1))) + x.amax(0).sum(), ((5, 3),)),
    TensorFunction("0-d operand", lambda _, x, y: x * y.sum(), ((5, 3), (4,))),
    TensorFunction("where", lambda ops, x, y: ops.where(x > 0, x, y), ((5, 3), (5, 3))),
)
_FUNCTION_MESHES: tuple[tuple[tuple[int, ...], int], ...] = (((3,), 12), ((2, 2), 8))


def function_differences() -> Iterator[str]:
    """Yield functions that differ on a sample of placements, or that are refused in all of them."""
    for mesh, limit in _FUNCTION_MESHES:
        for seed, function in enumerate(FUNCTIONS):
            arrays = [
                np.random.default_rng([seed, index]).standard_normal(shape)
                for index, shape in enumerate(function.shapes)
            ]
            report = check_function(function, arrays, mesh, platform="torch", limit=limit, seed=seed)
            if not report.ok or report.rejected:
                failure = (*report.wrong, *report.rejected, "nothing was compared")[0]
                yield f"{function.name} on {mesh}: {failure}"


_SCENARIO_MESHES = ((2,), (3,))


def _run_scenarios() -> Iterator[str]:
    for mesh in _SCENARIO_MESHES:
        for scenario in SCENARIOS:
            simulate(_run_scenario, int(np.prod(mesh)), _PLATFORM, (scenario, mesh))
    yield from ()


def _run_scenario(scenario: Callable[[Fixture], None], mesh: tuple[int, ...]) -> None:
    scenario(Fixture(mesh))


def _wrong_redistributions(*meshes: tuple[int, ...], targets: int | None = None) -> Iterator[str]:
    for mesh in meshes:
        yield first_wrong(_PLATFORM, mesh, targets=targets)


def _changed_costs(compute_costs: Callable[[], dict[str, Costs]]) -> Iterator[str]:
    before = _unchanged_costs(compute_costs)
    for name, cost in compute_costs().items():
        if cost != before[name]:
            yield f"{name}: {cost}, {before[name]} before"


@lru_cache
def _unchanged_costs(compute_costs: Callable[[], dict[str, Costs]]) -> dict[str, Costs]:
    """Return the costs of the unchanged library; :func:`keep_costs` calls it before a process is forked."""
    return compute_costs()


_REDISTRIBUTION: tuple[Check, ...] = (
    partial(_wrong_redistributions, (3,)), _run_scenarios, partial(_changed_costs, plan_costs),
    partial(_wrong_redistributions, (2,), (4,)), partial(_wrong_redistributions, (2, 3), (2, 2), targets=6),
    function_differences,
)  # fmt: skip
# A plan that sends too much still gives right values, so costs notice most mutants of the search.
_SEARCH: tuple[Check, ...] = (
    late_plans, partial(_changed_costs, plan_costs), partial(_changed_costs, search_efforts), *_REDISTRIBUTION,
)  # fmt: skip
_DISPATCH: tuple[Check, ...] = (_run_scenarios, partial(_changed_costs, choice_costs), function_differences)

MODULE_CHECKS: dict[str, tuple[Check, ...]] = {
    "hyper_parallel.core.dtensor.steps": _REDISTRIBUTION,
    "hyper_parallel.core.dtensor.transition": _REDISTRIBUTION,
    "hyper_parallel.core.dtensor.redistribute": _REDISTRIBUTION,
    "hyper_parallel.core.dtensor.cheapest_steps": _SEARCH,
    "hyper_parallel.core.shard.dispatch": _DISPATCH,
    "hyper_parallel.core.shard.executor": _DISPATCH,
    "hyper_parallel.core.shard.op_plan": _DISPATCH,
    "hyper_parallel.core.shard.entry": _DISPATCH,
    "hyper_parallel.core.shard.strategy": _DISPATCH,
}
"""Modules whose functions are changed, with the checks that must notice."""


def keep_costs(checks: tuple[Check, ...]) -> None:
    """Compute the costs that ``checks`` compare with, before anything is changed."""
    for check in checks:
        if isinstance(check, partial) and check.func is _changed_costs:
            _unchanged_costs(*check.args)

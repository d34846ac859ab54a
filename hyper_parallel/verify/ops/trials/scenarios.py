"""Scenarios of the dispatcher that no single call shows: keys, doors, plans that are kept, what is written and watched.

Each is what one rank does; what it asserts holds on every rank. Those that notice most come first.
"""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.verify.ops.trials.answers import (
    constants_meet_distributed_tensors,
    dispatch_is_skipped,
    local_calls_that_differ,
    outputs_that_only_the_call_tells,
    pieces_that_are_dense_by_chance,
    several_outputs,
    the_operand_itself,
    views_write_through_or_are_read_only,
    whole_layouts_as_answers,
    writes_return_what_is_written,
)
from hyper_parallel.verify.ops.trials.choices import (
    axes_keep_their_order,
    moves_have_prices,
    options_are_compared,
    rows_state_conditions,
    writes_stay_where_they_are,
)
from hyper_parallel.verify.ops.trials.gradients import (
    gathered_values_send_gradients_straight_back,
    gradients_are_differentiable,
    kept_views_serve_until_written,
    moves_are_recorded_and_forbidden,
    plans_are_kept_and_bounded,
    reductions_need_no_gradient,
    views_of_a_framework_that_loses_writes,
    what_gathers_is_known,
)
from hyper_parallel.verify.ops.trials.keys import (
    canonical_operators_by_name,
    doors_of_python_operators,
    dtypes_are_in_the_key_where_they_count,
    failures_leave_no_plan,
    keys_tell_values_apart,
    locals_come_in_their_containers,
    numbers_share_a_plan,
    operands_are_counted_as_the_rule_names_them,
    operands_stand_anywhere,
    plans_are_bounded,
    plans_are_found_again,
    signatures,
)
from hyper_parallel.verify.ops.trials.stage import Stage

__all__ = ["SCENARIOS"]

SCENARIOS: tuple[Callable[[Stage], None], ...] = (
    operands_stand_anywhere, numbers_share_a_plan, local_calls_that_differ, several_outputs, keys_tell_values_apart,
    plans_are_found_again, dtypes_are_in_the_key_where_they_count, failures_leave_no_plan, plans_are_bounded,
    locals_come_in_their_containers, doors_of_python_operators, canonical_operators_by_name, signatures,
    operands_are_counted_as_the_rule_names_them,
    dispatch_is_skipped, constants_meet_distributed_tensors, outputs_that_only_the_call_tells, whole_layouts_as_answers,
    writes_return_what_is_written, views_write_through_or_are_read_only, the_operand_itself,
    moves_are_recorded_and_forbidden, kept_views_serve_until_written, gradients_are_differentiable,
    gathered_values_send_gradients_straight_back, reductions_need_no_gradient, views_of_a_framework_that_loses_writes,
    pieces_that_are_dense_by_chance, rows_state_conditions, axes_keep_their_order, writes_stay_where_they_are,
    what_gathers_is_known, plans_are_kept_and_bounded,
    moves_have_prices, options_are_compared,
)  # fmt: skip

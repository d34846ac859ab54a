"""Placements that would be true and that a rule does not claim: computed without any adapter, on one axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.rule import Row, Strategies
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.verify.ops.pieces import allows
from hyper_parallel.verify.ops.rows import Claim

if TYPE_CHECKING:
    from hyper_parallel.verify.ops.rows import Problem
    from hyper_parallel.verify.ops.rule_level import Bench

__all__ = ["unclaimed"]

_MOST = 80  # tuples of placements per sample and mesh


def unclaimed(bench: Bench, problem: Problem, strategies: Strategies) -> Iterator[Row]:
    """Rows that hold on this sample, forward and backward, whose operands' placements the rule does not take."""
    known = {row.inputs for row in strategies.rows}
    options = [_kinds(array) for array in bench.filled.arrays]
    for inputs in itertools.islice(itertools.product(*options), _MOST):
        if inputs in known or all(place == Replicate() for place in inputs):
            continue
        found = _true_row(bench, problem, strategies, inputs)
        if found is not None:
            yield found


def _kinds(array: Any) -> list[Placement]:
    pending = (Partial(op) for op in PARTIAL_OPS if allows(array, op))
    return [Replicate(), *(Shard(dim) for dim in range(array.ndim)), *pending]


def _true_row(bench: Bench, problem: Problem, strategies: Strategies, inputs: Sequence[Placement]) -> Row | None:
    """Outputs of all candidates come from the same local calls; only those that hold are differentiated."""
    candidates = []
    for outputs in _candidates(bench):
        row = Row(tuple(inputs), outputs)
        plain = Strategies((row,), strategies.outputs, None, strategies.many)
        choice = combine(problem.call, plain, (row,), (0,))
        assert choice is not None, "a row without conditions fits all sizes"
        candidates.append(Claim((row,), choice, plain))
    try:
        holds = bench.forward(candidates)
    except Exception:  # noqa: BLE001 - the local call cannot run on these pieces, whatever is said of the output
        return None
    for claim, true in zip(candidates, holds, strict=True):
        if not true:
            continue
        (result,) = bench.run([claim])
        if result.crash or result.rejected:
            return None
        if not result.problems:
            return claim.rows[0]
    return None


def _candidates(bench: Bench) -> Iterator[tuple[Placement, ...]]:
    """One placement for all outputs."""
    outputs = bench.reference.outputs
    for place in _kinds(outputs[0]):
        if all(not isinstance(place, Shard) or place.dim < one.ndim for one in outputs):
            yield (place,) * len(outputs)

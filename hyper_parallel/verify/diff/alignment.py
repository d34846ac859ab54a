"""Aligns the calls of two runs, in steps where one of them calls a module more often.

Records are compared by name, step and call. If a run has an additional call (a recomputation, an evaluation, a log),
all later calls would be compared with the wrong ones. In such steps, calls of a module are aligned as sequences: by
their results if some results are equal, else by the order of all modules' calls in the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.matching import find_part
from hyper_parallel.verify.engine.store import largest, same_values
from hyper_parallel.verify.engine.wording import value_words
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

__all__ = ["CLOSE", "align_calls"]

_CALLED = ("output", "mask", "loss", "norm", "value", "call")
CLOSE = 2.0**-11
"""Difference, relative to the largest number, below which two values are equal: half of float32's digits."""

_Name = tuple[str, str, int]


def align_calls(reference: Run, other: Run) -> tuple[Run, list[str]]:
    """Return the other run with the reference's call numbers, and a description of the aligned calls.

    Args:
        reference: a run on one rank.
        other: a run on any number of ranks.
    """
    known = _by_name(reference.ranks[0].records)
    order = _order(reference.ranks[0].records)
    ranks: list[RankRecords] = []
    unequal: dict[tuple[str, str], tuple[int, int, int]] = {}
    for rank in other.ranks:
        own = _by_name(rank.records)
        calls: dict[tuple[_Name, int], int] = {}
        for name in [name for name in own if name in known and len(own[name]) != len(known[name])]:
            pairs = _pairs(known[name], own[name]) or _by_order(name, order, _order(rank.records))
            calls.update(_numbers(name, pairs, len(known[name]), len(own[name])))
            unequal.setdefault(name[:2], (name[2], len(known[name]), len(own[name])))
        ranks.append(replace(rank, records=[_renumbered(record, calls) for record in rank.records]))
    words = [
        f"{value_words(*name)}: {_times(there)} in step {step + 1} of A, {here} in that of B; calls were aligned"
        for name, (step, there, here) in unequal.items()
    ]
    return Run(ranks, other.settings), words


def _times(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


def _by_name(records: Sequence[Record]) -> dict[_Name, list[Record]]:
    names: dict[_Name, list[Record]] = {}
    for record in records:
        if record.kind in _CALLED:
            names.setdefault((record.kind, record.name, record.step), []).append(record)
    return names


def _order(records: Sequence[Record]) -> dict[int, list[tuple[str, str]]]:
    """Return, for each step, the kinds and names of the values in the order of execution."""
    steps: dict[int, list[tuple[str, str]]] = {}
    for record in records:
        if record.kind in _CALLED:
            steps.setdefault(record.step, []).append((record.kind, record.name))
    return steps


def _pairs(known: Sequence[Record], own: Sequence[Record]) -> list[tuple[int, int]]:
    """Return pairs of calls with equal results, in the order of both runs: the most pairs, with the nearest values."""
    off = [[_distance(one.value, other.value) for other in own] for one in known]
    best = {(left, right): _Pairs() for left in range(len(known) + 1) for right in range(len(own) + 1)}
    for left in reversed(range(len(known))):
        for right in reversed(range(len(own))):
            choices = [best[left + 1, right], best[left, right + 1]]
            if off[left][right] <= CLOSE:
                choices.append(best[left + 1, right + 1].with_pair(left, right, off[left][right]))
            best[left, right] = max(choices, key=lambda choice: (len(choice.pairs), -choice.off))
    return list(best[0, 0].pairs)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of calls, and the total distance of their values."""

    pairs: tuple[tuple[int, int], ...] = ()
    off: float = 0.0

    def with_pair(self, left: int, right: int, off: float) -> _Pairs:
        """Return these pairs with one more pair before them."""
        return _Pairs(((left, right), *self.pairs), self.off + off)


def _distance(one: Any, other: Any) -> float:
    """Return the distance of two arrays, relative to the largest number; the second may be a shard of the first."""
    if same_values(one, other):
        return 0.0
    if np.shape(one) != np.shape(other):
        found = find_part(other, one, np.full(np.shape(one), CLOSE * largest(one)))
        return np.inf if found is None else _apart(np.asarray(one).reshape(-1)[found.positions], np.asarray(other))
    return _apart(np.asarray(one), np.asarray(other))


def _apart(one: Any, other: Any) -> float:
    if one.dtype.kind != "f" or not np.isfinite(one).all() or not np.isfinite(other).all():
        return 0.0 if np.array_equal(one, other) else np.inf
    off = float(np.abs(one.astype(np.float64) - other).max(initial=0.0))
    return off / (largest(one) or 1.0)


def _by_order(
    name: _Name, order: Mapping[int, list[tuple[str, str]]], own: Mapping[int, list[tuple[str, str]]]
) -> list[tuple[int, int]]:
    """Return pairs of calls that match if the step's calls of all modules are aligned as two sequences of names."""
    known, mine = order[name[2]], own[name[2]]
    blocks = SequenceMatcher(None, known, mine, autojunk=False).get_matching_blocks()
    places = [(block.a + number, block.b + number) for block in blocks for number in range(block.size)]
    return [
        (known[:left].count(name[:2]), mine[:right].count(name[:2]))
        for left, right in places
        if known[left] == name[:2]
    ]


def _numbers(name: _Name, pairs: Sequence[tuple[int, int]], known: int, own: int) -> dict[tuple[_Name, int], int]:
    """Return a new number for each call: that of the reference's paired call, or an unused number."""
    partner = {right: left for left, right in pairs}
    free = iter(range(known, known + own))
    return {(name, call): partner[call] if call in partner else next(free) for call in range(own)}


def _renumbered(record: Record, calls: Mapping[tuple[_Name, int], int]) -> Record:
    call = calls.get(((record.kind, record.name, record.step), record.call), record.call)
    return record if call == record.call else replace(record, call=call)

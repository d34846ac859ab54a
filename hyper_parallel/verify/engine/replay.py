"""Replays of the reference's dropout masks and near ties on the ranks, so that later values can be compared.

A rank that drops elements of its own samples with its own generator trains as correctly as the single device, but with
different numbers. So does a rank whose top-k decides a near tie differently. Such ranks run once more with the
reference's masks and choices. A mask is replaced only if the draws are those of a correct program: ranks with the same
shard drew the same mask, and ranks with different shards drew different masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import log
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.decisions import decisions_of
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement, renamed, renamed_path
from hyper_parallel.verify.engine.thresholds import sides_of
from hyper_parallel.verify.frameworks.contract.records import THRESHOLDS

__all__ = ["Replay", "plan_replay"]

_RANDOM = ("mask", "draw")

_CHANCE = 1e-7
"""Equal masks of different samples count as one shared draw if independent draws would be equal with a lower
probability than this.
"""


@dataclass
class Replay:
    """The masks, draws and choices that each rank takes from the reference.

    Attributes:
        table: masks and choices by rank and key, under the rank's own names.
        masks: number of masks, over all ranks.
        draws: number of draws of modules whose random numbers differ from the reference's.
        flips: number of near ties that ranks decided differently.
        decisions: number of all choices of the ranks.
        sides: number of values that rounding moved across a threshold.
        numbers: number of all values in the calls with such values.
    """

    table: dict[int, dict[Key, Any]] = field(default_factory=dict)
    masks: int = 0
    draws: int = 0
    flips: int = 0
    decisions: int = 0
    sides: int = 0
    numbers: int = 0

    def adds_to(self, applied: Replay | None) -> bool:
        """Return whether this plan replaces values that ``applied`` did not replace, or replaced by different ones."""
        known = {} if applied is None else applied.table
        return any(
            key not in known.get(rank, {}) or not _equal(key, known[rank][key], array)
            for rank, arrays in self.table.items()
            for key, array in arrays.items()
        )

    def with_draws_of(self, applied: Replay | None) -> Replay:
        """Return a plan that also replays the masks and draws of ``applied``, which no longer differ."""
        if applied is None:
            return self
        table = {
            rank: {key: array for key, array in own.items() if key[0] in _RANDOM} for rank, own in applied.table.items()
        }
        for rank, own in self.table.items():
            table.setdefault(rank, {}).update(own)
        counts = [
            max(getattr(self, name), getattr(applied, name)) for name in ("flips", "decisions", "sides", "numbers")
        ]
        return Replay(table, applied.masks + self.masks, applied.draws + self.draws, *counts)

    def words(self) -> list[str]:
        """Return a description of the replay, for the report."""
        lines = []
        if self.masks:
            lines.append(
                f"dropout: each rank draws for its own samples; {self.masks} masks of the reference were replayed"
            )
        if self.draws:
            lines.append(
                f"random numbers: each rank draws for its own samples; {self.draws} draws of the reference were "
                "replayed"
            )
        if self.flips:
            lines.append(
                f"decisions: {self.flips} of {self.decisions} are near ties that ranks decide otherwise, with margins "
                "within the bounds; the reference's were replayed"
            )
        if self.sides:
            lines.append(
                f"thresholds: {self.sides} of {self.numbers} numbers are nearer to one than rounding moves them, and "
                "on its other side on a rank; the reference's sides were replayed"
            )
        return lines


def _equal(key: Key, one: Any, other: Any) -> bool:
    """Return whether two replacements are equal; for sides of thresholds, whether the signs are equal."""
    return np.array_equal(np.sign(one), np.sign(other)) if key[0] == THRESHOLDS[1] else np.array_equal(one, other)


def plan_replay(runs: PairedRuns) -> Replay | None:
    """Return which values ranks take from the reference; None if there is nothing to replay.

    Args:
        runs: both runs.
    """
    plan = Replay()
    _add_masks(runs, plan)
    _add_draws(runs, plan)
    _add_choices(runs, plan)
    if not (plan.masks or plan.draws):  # numbers that follow replaced masks or draws will change
        _add_sides(runs, plan)
    return plan if plan.table else None


def _add_choices(runs: PairedRuns, plan: Replay) -> None:
    decisions = decisions_of(runs.bounds, runs.parallel, runs.names)
    plan.decisions = sum(len(decision.chosen) for decision in decisions)
    plan.flips = sum(len(decision.flips) for decision in decisions)
    if not plan.flips:
        return
    for decision in decisions:
        if not decision.outside:
            plan.table.setdefault(decision.rank, {})[decision.own] = decision.expected


def _add_sides(runs: PairedRuns, plan: Replay) -> None:
    for decision in sides_of(runs.bounds, runs.parallel, runs.names):
        plan.sides += len(decision.flips)
        plan.numbers += int(decision.chosen.size)
        plan.table.setdefault(decision.rank, {})[decision.own] = decision.expected


def _add_masks(runs: PairedRuns, plan: Replay) -> None:
    """Add masks up to the first mask with unknown rows, if some differ and all are drawn as in correct programs."""
    places: dict[tuple[Key, int], Placement | None] = {}
    expected: dict[tuple[Key, int], Any] = {}
    for key, record in runs.bounds.reference.items():
        found = {rank: runs.placement(key, rank) for rank in runs.holders(key)} if key[0] == "mask" else {}
        if any(place is None or place.pending for place in found.values()):
            break  # the rows of this mask are known once the earlier masks are replayed
        for rank, place in found.items():
            if place is not None:
                places[key, rank] = place
                expected[key, rank] = np.asarray(place.take(record.value))
                if expected[key, rank].shape != runs.value(key, rank).shape:
                    return
    other = {(key, rank) for (key, rank), mask in expected.items() if not np.array_equal(mask, runs.value(key, rank))}
    drawn = {(key, rank): runs.value(key, rank) for key, rank in places}
    if not other or not _drawn_right(drawn, places):
        return
    plan.masks = len(other)
    raw = [
        {renamed(record, names).key: record.key for record in rank.records if record.kind == "mask"}
        for rank, names in zip(runs.parallel.ranks, runs.names, strict=True)
    ]
    for (key, rank), mask in expected.items():
        plan.table.setdefault(rank, {})[raw[rank][key]] = mask


def _add_draws(runs: PairedRuns, plan: Replay) -> None:
    """Add random numbers that modules drew, in the same way as masks."""
    reference = {key: record for key, record in runs.bounds.records.items() if key[0] == "draw"}
    values: dict[tuple[Key, int], Any] = {}
    raw: dict[tuple[Key, int], Key] = {}
    for rank, (records, modules) in enumerate(zip(runs.parallel.ranks, runs.names, strict=True)):
        for record in records.records:
            if record.kind == "draw":
                path, _, function = record.name.rpartition(" ")
                key = ("draw", f"{renamed_path(path, modules)} {function}", record.step, record.call)
                values[key, rank], raw[key, rank] = np.asarray(record.value), record.key
    places: dict[tuple[Key, int], Placement | None] = {}
    expected: dict[tuple[Key, int], Any] = {}
    for key, record in reference.items():
        own = {rank: values[key, rank] for rank in range(runs.parallel.world_size) if (key, rank) in values}
        total = np.shape(record.value)
        found = {rank: runs.activations.by_rows(rank, value.shape, total) for rank, value in own.items()}
        if None in found.values():
            break  # the rows of this draw are known once the earlier draws are replayed
        for rank, place in found.items():
            if place is not None:
                places[key, rank] = place
                expected[key, rank] = np.asarray(place.take(record.value))
    other = [where for where, numbers in expected.items() if not np.array_equal(numbers, values[where])]
    if not other or not _drawn_right({where: values[where] for where in places}, places):
        return
    plan.draws = len(other)
    for (key, rank), numbers in expected.items():
        plan.table.setdefault(rank, {})[raw[key, rank]] = numbers


def _drawn_right(values: Mapping[tuple[Key, int], Any], places: Mapping[tuple[Key, int], Placement | None]) -> bool:
    """Return whether ranks with the same shard drew the same numbers, and ranks with different shards did not."""
    chance: dict[tuple[str, int, int], float] = {}
    different: set[tuple[str, int, int]] = set()
    holders: dict[Key, list[int]] = {}
    for key, rank in values:
        holders.setdefault(key, []).append(rank)
    for key, ranks in holders.items():
        for rank, other in combinations(ranks, 2):
            here, there, own, its = places[key, rank], places[key, other], values[key, rank], values[key, other]
            if here is None or there is None or own.ndim != its.ndim:
                return False
            if here.same_place(there):
                if not np.array_equal(own, its):
                    return False
                continue
            pair = (key[1], rank, other)
            rows = tuple(slice(0, min(sizes)) for sizes in zip(own.shape, its.shape, strict=True))
            equally = _log_chance(own[rows])
            chance[pair] = chance.get(pair, 0.0) + equally
            if not np.array_equal(own[rows], its[rows]):
                different.add(pair)
            elif equally < log(_CHANCE):  # equally seeded ranks with unequal shards draw equal numbers at first
                return False
    return bool(chance) and all(pair in different or equally > log(_CHANCE) for pair, equally in chance.items())


def _log_chance(drawn: Any) -> float:
    """Return the logarithm of the probability that an independent draw gives the same mask or the same numbers."""
    if drawn.dtype.kind != "b" and np.unique(drawn).size > 2:
        return float(-8 * drawn.size)
    kept = float(np.mean(drawn != 0)) if drawn.size else 1.0
    return float(drawn.size * log(kept**2 + (1 - kept) ** 2))

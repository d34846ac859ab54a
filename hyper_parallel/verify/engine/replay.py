"""What ranks take from the reference so that everything after it can be compared: dropout masks, near ties.

A rank that drops elements of its own samples by its own generator trains as right as the single device, with other
numbers; so does one whose top-k decides a near tie otherwise. Such ranks run once more with the reference's masks and
choices. A mask is replaced only where the draws are those of a right program: ranks with the same part drew the same
mask, and ranks with different parts did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.decisions import decisions_of
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement, renamed

__all__ = ["Replay", "plan_replay"]

_CHANCE = 1e-7
"""Masks of different samples are one and the same if independent draws would be equal less often than that."""


@dataclass
class Replay:
    """What each rank takes from the reference.

    Attributes:
        table: masks and choices by rank and key, under the rank's own names.
        masks: how many masks, over all ranks.
        flips: how many choices were near ties that ranks decided otherwise.
        decisions: how many choices the ranks made in all.
    """

    table: dict[int, dict[Key, Any]] = field(default_factory=dict)
    masks: int = 0
    flips: int = 0
    decisions: int = 0

    def adds_to(self, applied: Replay | None) -> bool:
        """Return whether this replaces something that ``applied`` did not, or by something else."""
        known = {} if applied is None else applied.table
        return any(
            key not in known.get(rank, {}) or not np.array_equal(known[rank][key], array)
            for rank, arrays in self.table.items()
            for key, array in arrays.items()
        )

    def with_masks_of(self, applied: Replay | None) -> Replay:
        """Return a plan that replays the masks of ``applied`` as well, which are right now and no reason any more."""
        if applied is None or self.masks:
            return self
        table = {
            rank: {key: array for key, array in own.items() if key[0] == "mask"} for rank, own in applied.table.items()
        }
        for rank, own in self.table.items():
            table.setdefault(rank, {}).update(own)
        return Replay(table, applied.masks, max(self.flips, applied.flips), max(self.decisions, applied.decisions))

    def words(self) -> list[str]:
        """Return what was replayed, for the report."""
        lines = []
        if self.masks:
            lines.append(
                f"dropout: each rank draws for its own samples; {self.masks} masks of the reference were replayed"
            )
        if self.flips:
            lines.append(
                f"decisions: {self.flips} of {self.decisions} are near ties that ranks decide otherwise, with margins "
                "within the bounds; the reference's were replayed"
            )
        return lines


def plan_replay(runs: PairedRuns) -> Replay | None:
    """Return what ranks should take from the reference; None where nothing differs that may.

    Args:
        runs: both runs.
    """
    plan = Replay()
    _add_masks(runs, plan)
    _add_choices(runs, plan)
    return plan if plan.table else None


def _add_choices(runs: PairedRuns, plan: Replay) -> None:
    decisions = decisions_of(runs.bounds, runs.parallel, runs.names)
    plan.decisions = sum(len(decision.chosen) for decision in decisions)
    plan.flips = sum(len(decision.flips) for decision in decisions)
    if not plan.flips:
        return
    for decision in decisions:
        if decision.expected is not None and not decision.outside:
            plan.table.setdefault(decision.rank, {})[decision.own] = decision.expected


def _add_masks(runs: PairedRuns, plan: Replay) -> None:
    """Add all masks, if some differ and all of them are drawn as right programs draw."""
    keys = [key for key in runs.bounds.reference if key[0] == "mask" and runs.holders(key)]
    places = {(key, rank): runs.placement(key, rank) for key in keys for rank in runs.holders(key)}
    expected: dict[tuple[Key, int], Any] = {}
    for (key, rank), place in places.items():
        if place is None or place.pending:
            return
        expected[key, rank] = np.asarray(place.take(runs.bounds.reference[key].value))
        if expected[key, rank].shape != runs.value(key, rank).shape:
            return
    other = {(key, rank) for (key, rank), mask in expected.items() if not np.array_equal(mask, runs.value(key, rank))}
    if not other or not _drawn_right(runs, keys, places):
        return
    plan.masks = len(other)
    raw = [
        {renamed(record, names).key: record.key for record in rank.records if record.kind == "mask"}
        for rank, names in zip(runs.parallel.ranks, runs.names, strict=True)
    ]
    for (key, rank), mask in expected.items():
        plan.table.setdefault(rank, {})[raw[rank][key]] = mask


def _drawn_right(runs: PairedRuns, keys: list[Key], places: Mapping[tuple[Key, int], Placement | None]) -> bool:
    """Return whether ranks with the same part have equal masks, and ranks with different parts have their own."""
    chance: dict[tuple[str, int, int], float] = {}
    different: set[tuple[str, int, int]] = set()
    parted = False
    for key in keys:
        holders = runs.holders(key)
        for position, rank in enumerate(holders):
            for other in holders[position + 1 :]:
                here, there = places[key, rank], places[key, other]
                mask, its = runs.value(key, rank), runs.value(key, other)
                if here is None or there is None:
                    return False
                if here.same_place(there):
                    if not np.array_equal(mask, its):
                        return False
                    continue
                parted = True
                pair = (key[1], rank, other)
                if mask.ndim != its.ndim:
                    return False
                rows = tuple(slice(0, min(sizes)) for sizes in zip(mask.shape, its.shape, strict=True))
                equally = _log_chance(mask[rows])
                chance[pair] = chance.get(pair, 0.0) + equally
                if not np.array_equal(mask[rows], its[rows]):
                    different.add(pair)
                elif equally < log(_CHANCE):  # one stream, from which ranks with unequal parts soon draw other numbers
                    return False
    return parted and all(pair in different or expected > log(_CHANCE) for pair, expected in chance.items())


def _log_chance(mask: Any) -> float:
    """Return the logarithm of how likely another draw is the same mask."""
    kept = float(np.mean(mask)) if mask.size else 1.0
    return float(mask.size * log(kept**2 + (1 - kept) ** 2))

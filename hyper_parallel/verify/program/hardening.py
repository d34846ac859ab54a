"""`verify program --harden`: reruns a program that passed, with fewer blind spots.

The program's code is not edited. Unsupported changes are skipped and reported; remaining blind spots stay
listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hyper_parallel._text import first_line
from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.repairs import Repairs, not_made, repairs_of
from hyper_parallel.verify.engine.samples import other_batch
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.engine.sizes import OtherSize, unequal_axes, uneven_sizes
from hyper_parallel.verify.frameworks.contract.record_log import ReplayTable
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.reference import Reference, check_recorded, compare_with, replaying, run_reference
from hyper_parallel.verify.program.report import HardenedCase
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.spec import error_summary

__all__ = ["Hardening"]

_DROPPED = ("contiguous-inputs", "equal-masks", "symmetric-inputs", "constant-cotangents", "constant-parameters")
"""Kinds of changes, in the order in which they are left out if a program does not support them."""

_UNSUPPORTED = {
    "mindspore": {
        "equal-data": "the recorder of MindSpore cannot weight losses",
        "symmetric-inputs": "parts of a batch are copies in MindSpore",
        "equal-masks": "parts of a batch are copies in MindSpore",
    }
}
"""For each framework, the kinds of changes that its recorder cannot make, and the reasons."""

_SIZES = ("equal-sizes", "even-dims")
"""Kinds of blind spots that a different world size removes."""

_DRAWS = 4
"""Number of attempts to draw masks for which the ranks' shards select different numbers of elements."""


@dataclass
class Hardening:
    """Hardens a program that passed.

    Attributes:
        program: the program that runs on the ranks.
        alone: the program that runs on one rank, as the reference.
        world: world of the ranks.
        mesh: sizes of the axes, if the user named them.
        declared: placements by pattern.
        seed: seed of perturbations and changes.
        progress: called with the name of each run before it starts.
        spots: blind spots that are not repaired.
        cases: the hardened cases that were run.
    """

    program: Program
    alone: Program
    world: World
    mesh: Mapping[str, int] | None
    declared: Mapping[str, str] | None
    seed: int
    progress: Callable[[str], None]
    spots: list[BlindSpot] = field(default_factory=list)
    cases: list[HardenedCase] = field(default_factory=list)

    def run(self, runs: PairedRuns, spots: Sequence[BlindSpot], reference: Reference) -> None:
        """Run the hardened cases: changed values on the same ranks, then different world sizes.

        Args:
            runs: the runs of the unchanged case, which were equal.
            spots: blind spots of that case.
            reference: the run on one rank, with its bounds.
        """
        self.spots = list(spots)
        self._change_values(runs, spots, reference.scratch)
        for spot in spots:
            if spot in self.spots and spot.kind in _SIZES:
                self._change_sizes(spot, runs, reference)

    def _change_sizes(self, spot: BlindSpot, runs: PairedRuns, reference: Reference) -> None:
        """Run the program with different world sizes, until it passes with one of them.

        A program may be correct with some world sizes only, so a difference counts only if the program passes with
        none.
        """
        mesh = self.mesh if self.program.function or self.mesh is None else None
        worlds = unequal_axes(runs, mesh) if spot.kind == "equal-sizes" else uneven_sizes(runs, spot.subject, mesh)
        reasons: list[str] = []
        differing: list[HardenedCase] = []
        for other in worlds:
            case, why = self._run_size(other, reference)
            if not why and case.verdict is not None and case.ok:
                left = {(each.kind, each.subject) for each in case.verdict.spots}
                if spot.kind not in {kind for kind, _ in left} or (spot.kind, spot.subject) not in left:
                    self.cases.append(case)
                    self.spots = [each for each in self.spots if each.kind not in _SIZES or _key(each) in left]
                    return
                why = "is as blind"
            if why:
                reasons.append(f"{other}: {why}")
            else:
                differing.append(case)
        self.cases += differing[:1]
        why = "; ".join(reasons) or "no other number of ranks fits what the program shards"
        self.spots = [_with_reason(each, {spot.kind: why}) if each == spot else each for each in self.spots]

    def _run_size(self, other: OtherSize, reference: Reference) -> tuple[HardenedCase, str]:
        """Return the case of a different world size, and why it is inconclusive (empty if it is not)."""
        axes = tuple(other.mesh.items()) if other.mesh else (("world", other.size),)
        case = HardenedCase([f"{other} instead of {self.world.size}"])
        self.progress(f"{other}, hardened ({self.world.launch})")
        try:
            with KeepSink(reference.scratch, f"{other.size} ranks") as sink:
                world = replace(self.world, size=other.size, mesh=axes)
                run = run_world(self.program, replace(world, limits=replace(world.limits, sink=sink)))
                check_recorded(self.program, run)
                again = replaying(
                    world, reference.scratch, lambda stored: run_world(self.program, stored), self.progress
                )
                _, verdict = compare_with(reference, run, other.mesh, self.declared, again=again)
        except RankFailedError as error:
            return case, f"a rank fails: {error_summary(error.__cause__ or error)}"
        except ValueError as error:
            return case, first_line(error)
        case = replace(case, verdict=verdict)
        first = verdict.first
        if first is None and not case.ok:
            return case, (verdict.incomplete or verdict.unplaced or ["nothing was compared"])[0]
        if first is not None and first.step < 0:
            return case, f"the ranks hold other weights before training: {first}"
        if first is not None and other_batch(reference.run, run, self.program.name) is not None:
            return case, "the ranks see another batch"
        return case, ""

    def _change_values(self, runs: PairedRuns, spots: Sequence[BlindSpot], scratch: Scratch) -> None:
        """Run the program with changed values; leave out changes that it does not support."""
        dropped = dict(_UNSUPPORTED.get(self.world.platform, {}))
        draw = 0
        while True:
            repairs = repairs_of(runs, spots, self.seed + draw, tuple(dropped))
            if not repairs.words:
                break
            case, why, after = self._run_changed(repairs, runs, scratch)
            kind = next((kind for kind in _DROPPED if kind in repairs.words), "")
            if not why:
                if case.ok and draw < _DRAWS - 1 and _equal_by_chance(repairs, after):
                    draw += 1
                    continue
                self.cases.append(case)
                self._keep_unrepaired(repairs, after)
                break
            if not kind:
                dropped.update(dict.fromkeys(repairs.words, why))
                break
            dropped[kind] = why
        self.spots = [_with_reason(spot, {**repairs.left, **dropped}) for spot in self.spots]

    def _run_changed(
        self, repairs: Repairs, before: PairedRuns, scratch: Scratch
    ) -> tuple[HardenedCase, str, list[BlindSpot]]:
        """Return the case, why it cannot be used (empty if it can be), and its own blind spots."""
        case = HardenedCase(list(repairs.words.values()))
        try:
            reference = run_reference(self.alone, self.world, self.seed, self.progress, scratch, repairs.reference)
        except InputError as error:
            return case, first_line(error), []
        with reference:
            if _finite_losses(before.bounds.reference.values()) and not _finite_losses(reference.run.ranks[0].records):
                return case, "the single device's loss is not finite then", []
            self.progress(f"{self.world.size} ranks, hardened ({self.world.launch})")
            with KeepSink(scratch, f"{self.world.size} ranks") as sink:
                world = replace(self.world, limits=replace(self.world.limits, sink=sink))
                try:
                    run = run_world(self.program, world, changes=repairs.ranks)
                except (RankFailedError, InputError) as error:
                    summary = error_summary(error.__cause__ or error)
                    if "contiguous-inputs" in repairs.words:
                        return case, f"a rank fails then: {summary}", []
                    return replace(case, failure=str(error), cause=summary), "", []
                why = not_made(repairs, reference.run, run)
                again = replaying(
                    world,
                    scratch,
                    lambda stored: run_world(self.program, stored, changes=repairs.ranks),
                    self.progress,
                )
                return (case, why, []) if why else self._compared(case, reference, run, again)

    def _compared(
        self,
        case: HardenedCase,
        reference: Reference,
        run: Run,
        again: Callable[[ReplayTable], Run | None] | None,
    ) -> tuple[HardenedCase, str, list[BlindSpot]]:
        _, verdict = compare_with(reference, run, self.mesh, self.declared, again=again)
        case = replace(case, verdict=verdict)
        if not verdict.differences and not verdict.replicas and not case.ok:
            return case, (verdict.incomplete or verdict.unplaced or ["nothing was compared"])[0], []
        return case, "", verdict.spots

    def _keep_unrepaired(self, repairs: Repairs, after: Sequence[BlindSpot]) -> None:
        """Keep the blind spots that remain in the hardened case."""
        still = {(spot.kind, spot.subject) for spot in after}
        if not self.cases[-1].ok:
            return
        self.spots = [
            spot
            for spot in self.spots
            if (spot.kind, spot.subject) in still and not (spot.kind == "equal-data" and spot.subject in repairs.shared)
        ]


def _key(spot: BlindSpot) -> tuple[str, str]:
    return spot.kind, spot.subject


def _equal_by_chance(repairs: Repairs, after: Sequence[BlindSpot]) -> bool:
    """Return whether the changed masks select, by chance, the same number of elements on every rank again."""
    return "equal-masks" in repairs.words and any(spot.kind == "equal-masks" for spot in after)


def _with_reason(spot: BlindSpot, reasons: Mapping[str, str]) -> BlindSpot:
    """Return a blind spot with the reason why it could not be repaired."""
    why = reasons.get(spot.kind)
    return spot if why is None else replace(spot, repair=f"{spot.repair} (not repaired: {why})")


def _finite_losses(records: object) -> bool:
    losses = [record.value for record in records if record.kind == "loss"]  # type: ignore[attr-defined]
    return all(bool(np.isfinite(loss).all()) for loss in losses)

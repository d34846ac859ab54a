"""`--resume`: checks that a restarted program continues like an uninterrupted one.

The program runs on its ranks for some steps, in a private folder. It is then restarted in the same folder with
different arguments, on the same or a different number of ranks. The records of the restart are appended to those of the
steps before the stop. The joined run has placements, tolerances and step numbers like any other run, and is compared
with the reference in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.distance import within
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.engine.wording import value_words
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.isolation import run_folder
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.reference import Reference, check_recorded, compare_with
from hyper_parallel.verify.program.report import HardenedCase
from hyper_parallel.verify.program.worlds import World, run_world

__all__ = ["Resumption", "resumed_step", "verify_resumption"]

_UPDATED = ("weight", "buffer")
_MOMENTA = ("momentum_buffer", "moments")  # PyTorch's, MindSpore's
_MUCH_CLOSER = 1e-3


@dataclass(frozen=True)
class Resumption:
    """How a program is stopped and restarted.

    Attributes:
        again: the program with the arguments of the restart.
        after: number of optimizer steps after which the program is stopped; with None, half the steps of the reference.
        size: number of ranks of the restart; with None, the same as before.
    """

    again: Program
    after: int | None = None
    size: int | None = None


def verify_resumption(
    program: Program,
    resumption: Resumption,
    world: World,
    reference: Reference,
    progress: Callable[[str], None],
    declared: Mapping[str, str] | None,
) -> HardenedCase:
    """Return the case that compares a stopped and restarted program with an uninterrupted one.

    Args:
        program: the program with its own arguments.
        resumption: settings of the stop and the restart.
        world: world of the ranks.
        reference: the uninterrupted run on one rank.
        progress: called with the name of each run before it starts.
        declared: placements by pattern.

    Raises:
        InputError: the program makes too few steps, saves nothing, or restarts from the initial weights.
        RankFailedError: a rank fails.
    """
    total = reference.run.ranks[0].notes.get("optimizer steps", 0)
    after = _stop_after(resumption, total)
    size = resumption.size or world.size
    later = world if size == world.size else replace(world, size=size, mesh=(("world", size),))
    arguments = " ".join(resumption.again.arguments)
    with run_folder() as files:
        progress(f"{world.size} ranks, stopped after step {after}")
        first = _run(program, world, reference, after, "the ranks before they stop", files)
        saved = _files_in(files)
        if not saved:
            msg = (
                f"--resume: {program.name} writes no file in its first {after} steps, so there is nothing to start "
                "again from; stop it later with --resume-after"
            )
            raise InputError(msg)
        if size != world.size:
            progress(f"{size} ranks")
            first = _run(program, later, reference, after, f"{size} ranks")
        progress(f"{size} ranks, started again")
        limit = None if world.limits.steps is None else total - after
        second = _run(resumption.again, later, reference, limit, "the ranks that were started again", files)
    check_recorded(resumption.again, second)
    step = resumed_step(first.ranks[0], second.ranks[0], after - 1)
    if step < 0:
        msg = (
            f"--resume {arguments!r}: started again, {program.name} begins from its initial weights, so these "
            f"arguments resume nothing; by step {after} it had written {', '.join(saved[:4])}"
        )
        raise InputError(msg)
    joined = Run(
        [_joined(*ranks, step) for ranks in zip(first.ranks, second.ranks, strict=True)], dict(second.settings)
    )
    on = "" if size == world.size else f" on {size} ranks"
    words = f"stopped after step {after}, and started again{on} from what it saved after step {step + 1}: {arguments}"
    progress("comparison with the uninterrupted run")
    runs, verdict = compare_with(reference, joined, None, declared)
    verdict.spots = []
    _explain(runs, verdict, step)
    return HardenedCase([words.rstrip(": ")], verdict, title="resume")


def _stop_after(resumption: Resumption, total: int) -> int:
    after = resumption.after or max(1, total // 2)
    if after >= total:
        msg = (
            f"--resume: the uninterrupted run makes {total} optimizer step{'' if total == 1 else 's'}, so none is left "
            f"after step {after} to be compared; let it make more, or stop it earlier with --resume-after"
        )
        raise InputError(msg)
    return after


def _run(
    program: Program, world: World, reference: Reference, steps: int | None, words: str, files: Path | None = None
) -> Run:
    limits = replace(world.limits, steps=steps, sink=KeepSink(reference.scratch, words))
    return run_world(program, replace(world, limits=limits, output="nothing", keep_files=""), files=files)


def _files_in(folder: Path) -> list[str]:
    """Return the names of files with content that a run has written; markers of removed files are empty."""
    return sorted({path.name for path in folder.rglob("*") if path.is_file() and path.stat().st_size})


def resumed_step(first: RankRecords, second: RankRecords, expected: int) -> int:
    """Return the step after which a restart continues; -1 if it starts from the initial weights.

    Args:
        first: records of a rank in the uninterrupted run.
        second: records of the same rank after the restart.
        expected: the last step before the stop; a different step is returned only if its weights match much better.
    """
    weights = {record.name: np.asarray(record.value) for record in second.records if record.is_initial_weight}
    distances: dict[int, float] = {}
    for step in range(-1, expected + 1):
        known = {
            record.name: np.asarray(record.value)
            for record in first.records
            if record.kind == "weight" and record.step == step
        }
        shared = [name for name in weights if name in known and known[name].shape == weights[name].shape]
        if shared:
            distances[step] = max(_distance(weights[name], known[name]) for name in shared)
    nearest = min(distances, key=lambda step: (distances[step], -step), default=expected)
    if expected in distances and distances[nearest] >= _MUCH_CLOSER * distances[expected]:
        return expected
    return nearest


def _distance(one: Any, other: Any) -> float:
    if not one.size:
        return 0.0
    scale = float(np.abs(other).max()) or 1.0
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max()) / scale


def _joined(first: RankRecords, second: RankRecords, step: int) -> RankRecords:
    """Return the records of an uninterrupted run up to ``step``, followed by those of the restart."""
    before = [
        record for record in first.records
        if record.step < step or (record.step == step and record.kind not in _UPDATED) or record.step < 0
    ]  # fmt: skip
    own = [
        replace(record, step=record.step + step + 1)
        for record in second.records
        if record.step >= 0 or record.kind in _UPDATED
    ]
    return RankRecords(first.rank, [*before, *own], second.groups, first.notes)


def _explain(runs: PairedRuns, verdict: Verdict, step: int) -> None:
    """Add a cause to the first difference if it shows what was not restored."""
    first = verdict.first
    if first is None or first.step > step + 1:
        return
    evidence = _not_restored(runs, first, step)
    if evidence:
        cause = Cause("not-restored", evidence=evidence)
        verdict.differences = [replace(first, cause=cause), *verdict.differences[1:]]


def _not_restored(runs: PairedRuns, first: Difference, step: int) -> str:
    """Return a sentence about what was not restored, if the first difference shows that; otherwise empty."""
    key = (first.kind, first.name, first.step, first.call)
    if key not in runs.bounds.reference or key not in runs.ranks[first.ranks[0]]:
        return ""
    if first.kind in _UPDATED and first.step == step:
        return f"it starts again from another value than the uninterrupted run has after step {step + 1}"
    if first.kind == "state":
        return _anew(runs, first, key)
    words = {
        "mask": "a mask is another one: the random state is not restored",
        "output": "the first output of the next step differs: other samples, or another random state",
        "loss": "all outputs of the next step are right and the loss is not: other targets",
    }
    if first.kind == "rate":
        own, other = float(runs.value(key, first.ranks[0])), float(np.asarray(runs.bounds.reference[key].value))
        words["rate"] = f"the learning rate is {own:.6g}, and {other:.6g} without a stop{_counts_anew(runs, first)}"
    same = f"all weights that it starts again from are those after step {step + 1}"
    return f"{same}; {words[first.kind]}" if first.kind in words else ""


def _counts_anew(runs: PairedRuns, first: Difference) -> str:
    """Return the end of a sentence if the optimizer counts its steps from 1 after the restart; otherwise empty."""
    rank = first.ranks[0]
    for key, record in runs.ranks[rank].items():
        if key[0] == "state" and key[1].endswith(":step") and key[2] == first.step and key in runs.bounds.reference:
            own, other = float(np.asarray(record.value)), float(np.asarray(runs.bounds.reference[key].value))
            if own == 1.0 != other:
                return f"; the optimizer has counted 1 step, {other:.0f} without a stop: its state starts anew"
    return ""


def _anew(runs: PairedRuns, first: Difference, key: Key) -> str:
    """Return the evidence that an optimizer's state was reset; empty if there is none."""
    rank = first.ranks[0]
    parameter, _, entry = first.name.rpartition(":")
    counts = _counts_anew(runs, first)
    if counts:
        return f"all gradients are right{counts}"
    gradient = runs.bounds.last_gradient(parameter, first.step)
    placement = None if gradient is None else runs.placement(gradient, rank)
    if gradient is None or placement is None or entry not in _MOMENTA:
        return ""
    expected, allowed = runs.expected(gradient, placement)
    value = runs.value(key, rank)
    if value.shape == expected.shape and within(value, expected, allowed):
        words = value_words("gradient", parameter)
        return f"all gradients are right, and the momentum is {words} alone: the optimizer's state starts anew"
    return ""

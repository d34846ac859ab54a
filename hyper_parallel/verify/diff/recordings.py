"""Compares two recordings, or a recording with a program: `verify diff FOLDER FOLDER` or `FOLDER train.py`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hyper_parallel.verify.diff.measured import MeasuredProgram
from hyper_parallel.verify.diff.placed import PlacedSide, check_side
from hyper_parallel.verify.diff.recorded import Judged, judge, no_operators, pair_recordings
from hyper_parallel.verify.diff.recorded_report import (
    BLIND,
    BLIND_DUMP,
    BLIND_LOG,
    BLIND_TENSORS,
    RecordedReport,
    element_words,
    first_words,
    verdict_of,
)
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.engine.power import Power
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.wording import value_words, when_words
from hyper_parallel.verify.frameworks.contract.fingerprint import NORM
from hyper_parallel.verify.frameworks.contract.records import Record
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.stored import Recording, read_recording

__all__ = ["check_no_mesh", "compare_recordings", "diff_recordings"]

_SIDE = DiffSide("")


def diff_recordings(
    first: DiffSide,
    second: DiffSide,
    *,
    steps: int | None,
    seed: int,
    declared: Mapping[str, str] | None,
    timeout: float,
    scratch: str | None,
    budget: int | None,
    progress: Callable[[str], None],
) -> RecordedReport:
    """Compare two recordings, or a recording with a program that is run on as many ranks.

    The parameters are those of ``verify_diff``; at least one run is a recording. The program is stopped after
    ``steps``; with None, it makes the steps of the recording.

    Raises:
        InputError: (a ValueError) a folder is not a recording, or has options of a program; the program cannot be run
            on as many ranks as the recording has; or the two share nothing that can be compared.
    """
    for label, side in (("a", first), ("b", second)):
        if side.is_recording:
            _check_recorded_side(label, side)
        else:
            check_side(label, side)
    if first.is_recording and second.is_recording:
        if steps is not None:
            raise InputError("--steps stops a program; of two recordings all steps that both have are compared")
        return compare_recordings(
            str(first.target), str(second.target), declared=declared, meshes=(first.mesh, second.mesh)
        )
    started = time.perf_counter()
    recorded, ran = ("A", "B") if first.is_recording else ("B", "A")
    sides = {"A": first, "B": second}
    check_no_mesh(sides.values())
    recording = read_recording(str(sides[recorded].target), recorded)
    if recording.is_log:
        raise InputError(no_operators(recorded, recording))
    size, side = len(recording.ranks), sides[ran]
    if side.world_size not in (1, size):
        msg = f"{recorded} was recorded on {size} ranks; {ran} has {side.world_size}: leave its world size out"
        raise InputError(msg)
    last = max(recording.steps) + 1 if recording.steps else 1
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(Scratch(scratch, budget))
        placed = PlacedSide(ran, replace(side, world_size=size), steps or last, timeout, stack)
        words = {recorded: recording.words, ran: placed.words}
        frameworks = {recorded: recording.framework, ran: placed.world.platform}
        names, platforms = ((each["A"], each["B"]) for each in (words, frameworks))
        report = RecordedReport(names, platforms, seed, measured=True)
        measured = MeasuredProgram(placed, recording, seed, declared, folder, progress)
        judged, left_out, notes = measured.compare()
        report.verdict, report.blind = verdict_of(judged, size, ran), _blind(judged, recording)
        verdict = report.verdict
        verdict.skipped += left_out
        verdict.notes += [*notes, *element_words(judged), *recording.notes()]
        verdict.power = _power(judged)
        report.first_bits = first_words(judged)
        report.steps = len({each.pair.record.step for each in judged} - {-1})
        report.rounding = measured.rounding
        report.seconds = time.perf_counter() - started
    return report


def check_no_mesh(sides: Iterable[DiffSide]) -> None:
    """Check that no side has a mesh.

    Raises:
        InputError: a side has a mesh.
    """
    if any(side.mesh for side in sides):
        raise InputError(
            "--a-mesh and --b-mesh name the axes of two recordings; a program names its own: leave them out"
        )


def _check_recorded_side(label: str, side: DiffSide) -> None:
    """Check that a recording has no options of a program.

    Raises:
        InputError: the recording has such options.
    """
    options = {"rev": side.revision, "python": side.python, "platform": side.platform}
    given = [f"--{label}-{name}" for name, value in options.items() if value]
    given += [f"--{label}-world-size"] if side.world_size != _SIDE.world_size else []
    given += [f"--{label}-launch"] if side.launch != _SIDE.launch else []
    given += [f"--{label}-single-args"] if side.single_args is not None else []
    if given:
        msg = f"{label.upper()} is a recording, which is not run: leave {', '.join(given)} out"
        raise InputError(msg)


def compare_recordings(
    first: str | Path,
    second: str | Path,
    *,
    declared: Mapping[str, str] | None = None,
    meshes: tuple[Mapping[str, int] | None, Mapping[str, int] | None] = (None, None),
) -> RecordedReport:
    """Compare two recordings without running a program.

    Args:
        first: folder of recording A, or of a dump of msprobe.
        second: folder of recording B, or of a dump.
        declared: placements by pattern of names, with which the shards of ranks are joined.
        meshes: for A and for B, the sizes of the mesh axes that the placements name; the last axis varies fastest.

    Raises:
        InputError: (a ValueError) a folder is not a recording, a recording is damaged or has a different version, or
            the two share nothing that can be compared.
    """
    started = time.perf_counter()
    one, other = read_recording(first, "A"), read_recording(second, "B")
    pairs, left_out, notes, contradicted = pair_recordings(one, other, declared, meshes)
    judged = judge(pairs)
    report = RecordedReport((one.words, other.words), (one.framework, other.framework), 0)
    report.verdict, report.blind = verdict_of(judged, len(other.ranks)), _blind(judged, one, other)
    verdict = report.verdict
    verdict.skipped += left_out
    verdict.notes += [*notes, *element_words(judged), *one.notes(), *other.notes()]
    verdict.power = _power(judged)
    report.first_bits = first_words(judged)
    report.steps = len(one.steps & other.steps)
    report.grown = _grown(judged)
    report.contradicted = "; ".join(contradicted)
    recorded = (record for run in (one.run, other.run) for rank in run.ranks for record in rank.records)
    report.untrained = any(map(_trained, recorded)) and not any(_trained(each.pair.record) for each in judged)
    report.seconds = time.perf_counter() - started
    return report


def _blind(judged: Sequence[Judged], *recordings: Recording) -> str:
    """Return sentences about errors that the recordings cannot expose."""
    tensors = bool(judged) and all(each.pair.one.both_whole(each.pair.other) for each in judged)
    dump = BLIND_TENSORS if tensors else BLIND_DUMP
    texts = [dump if each.is_dump else BLIND_LOG if each.is_log else BLIND for each in recordings]
    return "; ".join(dict.fromkeys(texts))


def _trained(record: Record) -> bool:
    """Return whether a value shows the result of training: a gradient, or a parameter after an update."""
    return record.kind == "gradient" or (record.kind == "weight" and record.step >= 0)


def _grown(judged: Sequence[Judged]) -> str:
    """Return a description of the first value that could not be judged; empty if all were judged."""
    first = next((each for each in judged if each.unjudged), None)
    if first is None:
        return ""
    record, count = first.pair.record, sum(each.unjudged for each in judged)
    if record.kind == "call":
        why = (
            "bits had differed before the first update, and an update may magnify rounding to any size"
            if first.pair.one.both_have(NORM, first.pair.other)
            else "the logs have only hashes of bits of them: log the norm, too (hash_fn=['norm', 'hash_tensor'])"
        )
        where = f"{when_words(record.kind, record.step, record.call)} in {value_words(record.kind, record.name)}"
        return f"{count} of {len(judged)} values, the first {where}, have other bits and could not be judged: {why}"
    return (
        f"{count} of {len(judged)} values, the first {when_words(record.kind, record.step)}, could not be judged: "
        "rounding has grown so much before them that it may explain half of a value; compare fewer steps, or with the "
        "program, whose repeats measure rounding (verify diff FOLDER train.py)"
    )


def _power(judged: Sequence[Judged]) -> Power:
    """Return the errors of gradients that would have been detected."""
    largest: dict[str, float] = {}
    for each in judged:
        if each.pair.record.kind == "gradient":
            name = each.pair.record.name
            largest[name] = max(largest.get(name, 0.0), each.noticed)
    if not largest:
        return Power()
    ordered = sorted(largest.values())
    weakest = max(largest, key=largest.__getitem__)
    return Power(ordered[len(ordered) // 2], weakest, largest[weakest], count=len(largest))

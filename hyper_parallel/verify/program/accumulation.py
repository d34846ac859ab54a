"""`--accumulate`: checks that k micro-batches give the gradient of one batch.

Both runs are on one rank. The first run is the program with its own arguments, which already ran as the reference. The
second run has arguments with which the program processes the batch at once. It has its own perturbed repeats. Losses
and outputs differ between micro-batches and one batch, so only gradients, norms, optimizer states and weights are
compared. The cause of a different gradient is inferred from the gradients of the individual micro-batches, which an
additional run records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.distance import distance
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.samples import calls_of_first_step, rows_of_first_step
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.engine.store import same_values
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.reference import Reference, compare_with, run_reference
from hyper_parallel.verify.program.report import HardenedCase
from hyper_parallel.verify.program.worlds import World, run_world

__all__ = ["explain_micro_batches", "own_draws", "require_one_batch", "verify_accumulation", "verify_sum"]

_COMPARED = ("gradient", "norm", "rate", "state", "weight")
_ALONE = 1e-3
"""Relative tolerance of the weights of micro-batches; smaller weights count as zero."""


@dataclass(frozen=True)
class _Accumulation:
    """The two programs and their runs; attributes are those of :func:`verify_accumulation`."""

    program: Program
    one_batch: Program
    world: World
    reference: Reference
    progress: Callable[[str], None]


def verify_accumulation(
    program: Program,
    one_batch: Program,
    world: World,
    reference: Reference,
    seed: int,
    progress: Callable[[str], None],
) -> HardenedCase:
    """Return the case that compares a program's micro-batches with one batch.

    Args:
        program: the program with its own arguments.
        one_batch: the same program with arguments with which it processes the batch at once.
        world: world of the ranks; both runs use one rank.
        reference: the run of ``program`` on one rank.
        seed: seed of the perturbations.
        progress: called with the name of each run before it starts.

    Raises:
        InputError: the arguments do not give a single batch of the same samples, or the run fails.
    """
    arguments = " ".join(one_batch.arguments)
    with run_reference(one_batch, world, seed, progress, reference.scratch) as whole:
        calls = require_one_batch(program, arguments, reference.run, whole.run)
        words = (
            f"rank 0 is one rank with the program's own arguments, {calls} micro-batches in the first step; the single "
            f"device takes one batch: {arguments}"
        )
        progress("comparison with one batch")
        runs, verdict = compare_with(whole, _only_compared(reference.run), None, None)
        verdict.skipped = [line for line in verdict.skipped if "missing on all ranks" not in line]
        verdict.spots = []
        draws = own_draws(reference.run.ranks[0], whole.run.ranks[0])
        if not verdict.equal and draws:
            return HardenedCase([words], title="accumulate", skipped=draws, asked=True)
        _explain(_Accumulation(program, one_batch, world, reference, progress), runs, verdict)
    return HardenedCase([words], verdict, title="accumulate")


def verify_sum(
    program: Program, world: World, reference: Reference, progress: Callable[[str], None]
) -> HardenedCase | None:
    """Return the case that compares the first step's gradients with the sum over its micro-batches; None if unknown.

    This is for programs that cannot process the batch at once. The case checks that every micro-batch contributes to
    the optimizer's gradient, but not that the weight of each micro-batch is right.

    Args:
        program: the program with its own arguments.
        world: world of the ranks; the run uses one rank.
        reference: the run of ``program`` on one rank.
        progress: called with the name of each run before it starts.
    """
    parts = _contributions(_Accumulation(program, program, world, reference, progress), 0)
    if parts is None or len(parts) < 2 or not _other_samples(reference.run):
        return None
    runs = PairedRuns(reference.run, reference.bounds, _only_compared(reference.run), None, None)
    keys = _common(runs, 0, parts)
    weights = _weights(runs, keys, parts, reference=True) if keys else None
    if weights is None:
        return None
    kept = [place for place, weight in enumerate(weights) if abs(weight) > _ALONE * np.abs(weights).max()]
    lost = [place for place in range(kept[-1]) if place not in kept]
    records = {record.key: record for record in reference.run.ranks[0].records}
    verdict = Verdict(1)
    verdict.counts["gradient"] = len(keys)
    verdict.checked = sum(int(np.size(records[key].value)) for key in keys)
    if lost:
        why = f"it is that of micro-batch {_listed([each + 1 for each in kept])} of {len(parts)} only"
        cause = Cause("micro-batches-lost", evidence=_lost_words(lost, len(parts), weights))
        verdict.differences = [
            Difference("gradient", key[1], records[key].module, (0,), 0, 0, math.inf, 0.0, why, cause=cause,
                       site=records[key].site)
            for key in keys
        ]  # fmt: skip
    words = (
        f"no option of {program.name} was found that makes it process one batch at once: the gradients of the first "
        f"step are compared with those of its {len(parts)} micro-batches; the weight of each is not tested"
    )
    return HardenedCase([words], verdict, title="accumulate")


def _other_samples(run: Run) -> bool:
    """Return whether each call of a model in the first step has different samples, as micro-batches do."""
    notes = run.ranks[0].notes
    inputs: Sequence[tuple[int, Any, Any]] = notes.get("inputs", ())
    calls = [rows_of_first_step([{"inputs": [each for each in inputs if each[0] == call]}]) for call in
             sorted({each[0] for each in inputs})]  # fmt: skip
    return all(
        one.get(name, set()).isdisjoint(rows) for place, one in enumerate(calls) for other in calls[:place]
        for name, rows in other.items()
    )  # fmt: skip


def _common(runs: PairedRuns, step: int, parts: Sequence[Mapping[str, Any]]) -> list[Key]:
    """Return the gradients of a step to which every micro-batch contributes."""
    return [
        key for key in runs.bounds.reference
        if key[0] == "gradient" and key[2:] == (step, 0) and key in runs.ranks[0]
        and all(key[1] in part for part in parts)
    ]  # fmt: skip


def _lost_words(lost: Sequence[int], count: int, weights: Any) -> str:
    kept = [place + 1 for place in range(count) if place not in lost]
    return (
        f"the optimizer sees the gradient of micro-batch {_listed(kept)} of {count}; that of "
        f"{_listed([place + 1 for place in lost])} is lost, as after a zero_grad() between them; weights of the "
        f"micro-batches' own gradients: {_listed(weights)}"
    )


def _only_compared(run: Run) -> Run:
    """Return a run without losses and outputs of training steps, which belong to single micro-batches."""
    rank = run.ranks[0]
    records = [record for record in rank.records if record.kind in _COMPARED or record.step < 0]
    return Run([replace(rank, records=records)], run.settings)


def require_one_batch(program: Program, arguments: str, own: Run, whole: Run) -> int:
    """Check the arguments for one batch, and return the number of micro-batches of the first step.

    Args:
        program: the program with its own arguments.
        arguments: the arguments for one batch.
        own: the run with the program's own arguments.
        whole: the run with ``arguments``.

    Raises:
        InputError: ``arguments`` do not give a larger batch, or the batch has different samples.
    """
    calls, other = (calls_of_first_step(run.ranks[0].notes) for run in (own, whole))
    if calls <= other:
        msg = (
            f"--accumulate {arguments!r}: {program.name} calls its model {calls} times in the first step with its own "
            f"arguments, and {other} times with these; they must make fewer and larger micro-batches, such as "
            "'--accum 1' for a script that is run with '--accum 4'"
        )
        raise InputError(msg)
    rows, known = (rows_of_first_step([run.ranks[0].notes]) for run in (own, whole))
    for name in known:
        if name in rows and rows[name] != known[name]:
            msg = (
                f"--accumulate {arguments!r}: in the first step {program.name} is trained on {len(rows[name])} samples "
                f"with its own arguments and on {len(known[name])} "
            )
            others = len(known[name] - rows[name])
            if others:
                msg += f"with these, {others} of which are others; both must train on the same samples"
            else:
                msg += (
                    "of them with these; the one batch must have all, such as '--accum 1 --batch 8' for a script that "
                    "is run with '--accum 4 --batch 2'; `--accumulate auto` tries both options"
                )
            raise InputError(msg)
    return calls


def own_draws(own: RankRecords, whole: RankRecords) -> str:
    """Return why micro-batches cannot give the gradient of one batch; empty if they can."""
    if any(record.kind == "mask" for rank in (own, whole) for record in rank.records):
        return "dropout draws other masks for micro-batches than for one batch; set its probability to 0"
    for one, other in ((own, whole), (whole, own)):
        index = {record.key: record.value for record in other.records if record.kind == "buffer" and record.step >= 0}
        for record in one.records:
            if record.key in index and not same_values(record.value, index[record.key]):
                return (
                    f"buffer {record.name} depends on the batch that a layer is called with, as statistics of a batch "
                    "do; let the layer be in eval mode, or use one without such statistics"
                )
    return ""


def _explain(case: _Accumulation, runs: PairedRuns, verdict: Verdict) -> None:
    """Add the cause of a difference in the first gradient to the verdict, from the gradients of the micro-batches."""
    first = next((each for each in verdict.differences if each.kind == "gradient"), None)
    if first is None:
        return
    parts = _contributions(case, first.step)
    cause = None if parts is None else explain_micro_batches(runs, first.step, parts)
    if cause is None:
        cause = Cause(
            "unexplained", evidence="no weights of the micro-batches' own gradients add up to the gradient of one batch"
        )
    verdict.differences = [
        replace(each, cause=cause) if each.step == first.step and each.cause is not None else each
        for each in verdict.differences
    ]


def _contributions(case: _Accumulation, step: int) -> Sequence[Mapping[str, Any]] | None:
    """Return, for each micro-batch, the gradients that its backward added; None if a recorder cannot keep them."""
    case.progress("reference, gradients of micro-batches")
    with KeepSink(case.reference.scratch, "the gradients of micro-batches") as sink:
        world = case.world.alone("nothing")
        limits = replace(world.limits, sink=sink, steps=step + 1, contributions=step)
        try:
            run = run_world(case.program, replace(world, limits=limits))
        except RankFailedError:
            return None
        parts: Sequence[Mapping[str, Any]] | None = run.ranks[0].notes.get("contributions")
        return parts


def explain_micro_batches(runs: PairedRuns, step: int, parts: Sequence[Mapping[str, Any]]) -> Cause | None:
    """Return how the weights of micro-batches differ between both runs; None if no weights explain both.

    Args:
        runs: one batch as the reference, and micro-batches on rank 0.
        step: the step in which a gradient differs.
        parts: for each micro-batch, what its backward added to the gradient of each parameter.
    """
    keys = _common(runs, step, parts)
    if len(parts) < 2 or not keys:
        return None
    wanted = _weights(runs, keys, parts, reference=True)
    actual = _weights(runs, keys, parts, reference=False)
    if wanted is None or actual is None:
        return None
    slack = _ALONE * max(np.abs(wanted).max(), np.abs(actual).max())
    lost = [place for place in range(len(parts)) if abs(actual[place]) <= slack < abs(wanted[place])]
    numbers = f"weights of the micro-batches' own gradients: {_listed(actual)}; one batch gives {_listed(wanted)}"
    if lost:
        sentence = f"{_lost_words(lost, len(parts), actual)}; one batch gives {_listed(wanted)}"
        return Cause("micro-batches-lost", evidence=sentence)
    factors = actual / np.where(np.abs(wanted) > slack, wanted, np.nan)
    if np.isfinite(factors).all() and np.ptp(factors) <= _ALONE * np.abs(factors).max():
        factor = float(factors.mean())
        for kind, expected, what in (
            ("sum-for-average", len(parts), "losses of micro-batches are added up, not averaged"),
            ("average-for-sum", 1 / len(parts), "losses of micro-batches are averaged, not added up"),
        ):
            if abs(factor - expected) <= _ALONE * expected:
                return Cause(kind, "micro-batches", f"{what}; {numbers}")
        return Cause("scaled", "micro-batches", f"all micro-batches weigh {factor:.6g} times too much; {numbers}")
    sentence = "micro-batches do not weigh what they weigh in one batch, as means over unequal numbers of tokens do"
    return Cause("scaled-by-count", "micro-batches", f"{sentence}; {numbers}")


def _weights(
    runs: PairedRuns, keys: Sequence[Key], parts: Sequence[Mapping[str, Any]], *, reference: bool
) -> Any | None:
    """Return weights with which the micro-batches' gradients add up to those of a run; None if there are none."""
    values = {key: np.asarray(runs.bounds.reference[key].value if reference else runs.value(key, 0)) for key in keys}
    columns = [np.concatenate([np.asarray(part[key[1]], np.float64).reshape(-1) for key in keys]) for part in parts]
    target = np.concatenate([values[key].astype(np.float64).reshape(-1) for key in keys])
    if any(column.shape != target.shape for column in columns) or not np.isfinite([target, *columns]).all():
        return None
    weights, _, rank, _ = np.linalg.lstsq(np.stack(columns, 1), target, rcond=1e-6)
    if rank < len(parts):
        return None
    for key in keys:
        fitted = np.sum([w * np.asarray(part[key[1]], np.float64) for w, part in zip(weights, parts, strict=True)], 0)
        allowed = runs.bounds.allowed(key) * max(1.0, float(np.abs(weights).sum()))
        if distance(fitted, values[key].astype(np.float64), allowed, runs.bounds.floor(key)).ratio > 1:
            return None
    return weights


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{0.0 if abs(number) < 1e-6 else number:.4g}" for number in numbers)

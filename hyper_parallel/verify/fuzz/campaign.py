"""Runs many programs in worker processes until a count or a time is reached; the programs of a batch share a world."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.fuzz import reproduce
from hyper_parallel.verify.fuzz.generate import Generator
from hyper_parallel.verify.fuzz.report import Counts, Finding, FuzzReport
from hyper_parallel.verify.fuzz.shrink import shrink
from hyper_parallel.verify.fuzz.world import rows_used, run_programs
from hyper_parallel.verify.report_files import write_text

if TYPE_CHECKING:
    from hyper_parallel.verify.fuzz.program import Outcome, Program

__all__ = ["BATCH", "Batch", "Settings", "run_batch", "run_campaign", "world_of"]

BATCH = 64
"""Programs that share a world; the number of ranks depends on the seed and the number of the batch."""

_WORLDS = (1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 6, 8)
_MOST_SHRUNK = 4  # maximum number of findings of a batch that are reduced; the others are only counted
_ALONE_SECONDS = 60.0
_SHRINK_SECONDS = 20.0


@dataclass(frozen=True)
class Settings:
    """Settings of a fuzz run.

    Attributes:
        frameworks: names of frameworks.
        seed: seed of all programs.
        count: programs per framework; None for no limit.
        first: number of the first program.
        dtypes: names of dtypes that programs mix; empty for one floating dtype per program.
        seconds: wall time after which no further batch starts; None for no limit.
        jobs: worker processes; 0 runs everything in this process.
        folder: where reproducers are written; None writes none.
    """

    frameworks: tuple[str, ...]
    seed: int = 0
    count: int | None = 1000
    seconds: float | None = None
    jobs: int = 1
    folder: str | None = None
    first: int = 0
    dtypes: tuple[str, ...] = ()


@dataclass
class Batch(Counts):
    """The results of one batch.

    Attributes:
        framework: name of the framework.
        world_size: the number of ranks.
        outcomes: programs by outcome.
        findings: programs that failed.
    """

    framework: str
    world_size: int
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def world_of(seed: int, batch: int) -> int:
    """Return the number of ranks of a batch."""
    return int(np.random.default_rng([seed, batch, 1]).choice(_WORLDS))


@lru_cache(maxsize=2)
def _generator(framework: str, dtypes: tuple[str, ...] = ()) -> Generator:
    return Generator(framework, dtypes)


def run_batch(
    framework: str,
    seed: int,
    numbers: range,
    folder: str | None = None,
    known: frozenset[str] = frozenset(),
    dtypes: tuple[str, ...] = (),
    *,
    shrinks: bool = True,
) -> Batch:
    """Run the programs of one batch, and reduce those that fail.

    Args:
        framework: name of the framework.
        seed: seed of the run.
        numbers: numbers of the programs, all of one batch; programs of a batch run on the same number of ranks.
        folder: where reproducers are written; None writes none.
        known: signatures of findings that were reduced already; findings with the same signature are only counted.
        dtypes: names of dtypes that programs mix; empty for one floating dtype per program.
        shrinks: whether to reduce failing programs; false if the process died while it reduced them.
    """
    started = time.process_time()
    world_size = world_of(seed, numbers.start // BATCH)
    batch = Batch(framework, world_size)
    with use_platform(framework):
        generator = _generator(framework, dtypes)
        programs = [generator.program(seed, program_number, world_size) for program_number in numbers]
        outcomes = run_programs(framework, programs)
        _count(batch, programs, outcomes)
        batch.processor_seconds = time.process_time() - started
        failed = [(program, outcome) for program, outcome in zip(programs, outcomes, strict=True) if outcome.is_finding]
        seen = set(known)
        for program, outcome in failed:
            look = _look(program, outcome)
            small = shrinks and look not in seen and len(seen) - len(known) < _MOST_SHRUNK
            seen.add(look)
            finding = _finding(framework, program, outcome, folder, look, small=small)
            batch.findings.append(finding if shrinks else replace(finding, left_whole=True))
    return batch


def _count(batch: Batch, programs: list[Program], outcomes: list[Outcome]) -> None:
    for program, outcome in zip(programs, outcomes, strict=True):
        batch.outcomes[outcome.kind] += 1
        batch.exact += outcome.exact and outcome.kind == "equal"
        batch.compared += outcome.compared
        batch.gradients += outcome.gradients
        batch.steps.update(step.call for step in program.steps)
        batch.modes[program.mode] += 1
        if outcome.kind == "refused":
            batch.refusals[_first_words(outcome.text)] += 1


def _first_words(text: str) -> str:
    """Return the beginning of a message, without operands."""
    head, _, rest = text.partition("\n")[0].partition("(")
    reason = rest.partition("): ")[2]
    return f"{head}: {reason}"[:120] if reason else head[:120]


def _look(program: Program, outcome: Outcome) -> str:
    """Return the signature that programs with the same defect likely share: kind, message without numbers, and call."""
    words = "".join(letter for letter in outcome.text.partition("\n")[0] if not letter.isdigit())
    calls = [step.call for step in program.steps if outcome.first in step.outs]
    return f"{outcome.kind} {program.mode if not calls else ''} {calls} {words[:60]}"


def _finding(
    framework: str, program: Program, outcome: Outcome, folder: str | None, look: str, *, small: bool
) -> Finding:
    """Return a failed program as a finding: reduced, and with a reproducer file if the program alone fails too."""
    seed, number = program.seed
    finding = Finding(framework, outcome.kind, outcome.text, seed, number, program.mesh, look=look)
    if not small:
        return finding

    def judge(candidate: Program) -> Outcome:
        return run_programs(framework, [candidate], timeout=_ALONE_SECONDS)[0]

    alone = judge(program)
    if alone.kind != outcome.kind:
        return finding
    program, outcome = shrink(program, alone, judge, framework, _SHRINK_SECONDS)
    source = reproduce.source_of(program, outcome, framework, _generator(framework).language)
    path = "" if folder is None else str(Path(folder) / f"{framework}-{seed}-{number}.py")
    shown = False
    if path:
        write_text(path, source, "--findings")
        shown = reproduce.fails(Path(path))
    calls = ", ".join(sorted({step.call for step in program.steps}))
    return Finding(
        framework, outcome.kind, outcome.text, seed, number, program.mesh, source, path, shown, calls=calls,
        mode=program.mode, look=look, rows=rows_used(framework, program),
    )  # fmt: skip


# -- batches until count or time ---------------------------------------------------------------------------------------


def run_campaign(settings: Settings, progress: Callable[[FuzzReport], None] = lambda _: None) -> FuzzReport:
    """Run batches until the count or the time is reached; a batch that has started is completed.

    Args:
        settings: settings of the run.
        progress: called after every batch.
    """
    started = time.monotonic()
    report = FuzzReport(settings.seed, settings.frameworks, dtypes=settings.dtypes)
    try:
        for batch in _batches(settings, started, report):
            _add(report, batch)
            report.seconds = time.monotonic() - started
            progress(report)
    except KeyboardInterrupt:
        report.note = "interrupted: a partial report"
    report.seconds = time.monotonic() - started
    return report


def _add(report: FuzzReport, batch: Batch) -> None:
    report.outcomes.setdefault(batch.framework, Counter()).update(batch.outcomes)
    report.worlds[str(batch.world_size)] += batch.outcomes.total()
    report.add_counts(batch)
    for finding in batch.findings:
        report.add(finding)


def _tasks(settings: Settings, started: float) -> Iterator[tuple[str, range]]:
    """Yield the framework and the program numbers of each batch; frameworks alternate."""
    start = settings.first
    while settings.count is None or start < settings.first + settings.count:
        end = (start // BATCH + 1) * BATCH
        if settings.count is not None:
            end = min(end, settings.first + settings.count)
        for framework in settings.frameworks:
            if settings.seconds is not None and time.monotonic() - started > settings.seconds:
                return
            yield framework, range(start, end)
        start = end


@dataclass(frozen=True)
class _Task:
    """A batch for a worker: its framework, its programs, and whether failing programs are reduced.

    A smaller program that is tried during a reduction may kill the process. The batch then runs again without
    reduction.
    """

    framework: str
    numbers: range
    shrinks: bool = True


def _batches(settings: Settings, started: float, report: FuzzReport) -> Iterator[Batch]:
    tasks = _tasks(settings, started)
    if not settings.jobs:
        for framework, numbers in tasks:
            yield run_batch(framework, settings.seed, numbers, settings.folder, report.looks, settings.dtypes)
        return
    pool = _pool(settings.jobs)
    running: dict[Future[Batch], _Task] = {}
    again: list[_Task] = []
    try:
        while True:
            while len(running) < settings.jobs:
                task = again.pop() if again else next((_Task(*each) for each in tasks), None)
                if task is None:
                    break
                arguments = (
                    task.framework,
                    settings.seed,
                    task.numbers,
                    settings.folder,
                    report.looks,
                    settings.dtypes,
                )
                running[pool.submit(run_batch, *arguments, shrinks=task.shrinks)] = task
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    lost = (task, *running.values())
                    again += [replace(each, shrinks=False) for each in lost if each.shrinks]
                    yield from (_lost(settings.seed, each) for each in lost if not each.shrinks)
                    running.clear()
                    pool = _pool(settings.jobs)
                    break
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, get_context("spawn"))


def _lost(seed: int, task: _Task) -> Batch:
    """Return the results of a batch whose process died twice."""
    framework, numbers = task.framework, task.numbers
    number = numbers.start // BATCH
    batch = Batch(framework, world_of(seed, number), Counter({"internal error": len(numbers)}))
    text = f"the process of batch {number} died: programs {numbers[0]} to {numbers[-1]}"
    batch.findings.append(Finding(framework, "internal error", text, seed, numbers.start))
    return batch

"""Tests the harness: injects every kind of fault and checks that it is reported.

One run per framework without any fault must pass: a harness that rejects everything catches everything.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.base import Transport
from hyper_parallel.transport.real.launched_processes import LaunchedRun, close_launched_teams, run_launched, warm_up
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE
from hyper_parallel.verify.faults import FAULTS
from hyper_parallel.verify.run_arguments import LAUNCHES
from hyper_parallel.verify.simulate import simulate
from workshop.coverage.gates import check_ranks
from workshop.self_test import rank_faults
from workshop.self_test.rank_faults import FAULTY_RANK

__all__ = ["LAUNCHES", "Injection", "InjectionResult", "injections"]


_RANKS = 3
_HANG_SECONDS = 2.0
_TIMEOUT = 60.0

_RankFault = Callable[[Transport], None]
_Run = Callable[[str, "_RankFault | None", float], "Exception | None"]


@dataclass(frozen=True)
class InjectionResult:
    """The result of one injection.

    Attributes:
        name: what was injected.
        caught: whether it was reported with the expected words.
        message: the line that reports it, or what was reported instead.
        seconds: time until the report.
    """

    name: str
    caught: bool
    message: str
    seconds: float


@dataclass(frozen=True)
class Injection:
    """A fault to inject.

    Attributes:
        name: what is injected.
        inject: injects it; returns whether it was caught, and the report.
    """

    name: str
    inject: Callable[[], tuple[bool, str]]

    def run(self) -> InjectionResult:
        """Inject the fault and time its report."""
        start = time.monotonic()
        caught, message = self.inject()
        return InjectionResult(self.name, caught, message, time.monotonic() - start)


def _odd(what: str) -> str:
    """The beginning of the report that the faulty rank differs from all others in ``what``."""
    others = ", ".join(str(rank) for rank in range(_RANKS) if rank != FAULTY_RANK)
    return f"rank {FAULTY_RANK} disagrees with ranks {others} about the {what} of collective "


# By name: what the faulty rank does while the others sum ones, and the words that the report must contain.
_RANK_FAULTS: dict[str, tuple[_RankFault, tuple[str, ...]]] = {
    # First, on ranks that the run without a fault has warmed up: time spent on imports counts.
    "rank hangs": (
        rank_faults.hang,
        (f"rank {FAULTY_RANK} of {_RANKS} did not finish within 2 s", "in hang", "for ranks [1"),
    ),
    "rank raises": (
        rank_faults.raise_error,
        (f"rank {FAULTY_RANK} of {_RANKS} failed", "ArithmeticError: injected on rank 1"),
    ),
    "mismatched operation": (
        rank_faults.join_barrier,
        (_odd("operation"), f"rank {FAULTY_RANK}: barrier()", ".py:"),
    ),
    "mismatched shape": (partial(rank_faults.sum_ones, size=4), (_odd("shape"), "f32[4]", ".py:")),
    "mismatched dtype": (partial(rank_faults.sum_ones, dtype="int32"), (_odd("dtype"), "i32[3]", ".py:")),
    "mismatched reduction": (
        partial(rank_faults.sum_ones, op="max"),
        (_odd("reduction"), "f32[3], max", ".py:"),
    ),
    "collective left out": (
        rank_faults.skip_collective,
        (f"rank {FAULTY_RANK} returned without joining", "all_reduce(f32[3], sum)"),
    ),
}
_PROCESS_FAULTS: dict[str, tuple[_RankFault, tuple[str, ...]]] = {
    "rank calls os._exit": (
        rank_faults.exit_without_report,
        (f"rank {FAULTY_RANK} died with exit code 3", "in exit_without_report"),
    ),
    "rank gets SIGKILL": (rank_faults.kill_self, (f"rank {FAULTY_RANK} died of SIGKILL",)),
}


def injections(platform: str, launch: str) -> Iterator[Injection]:
    """Yield every injection for a framework and a launch, first the run without a fault, which must pass."""
    run = _run_simulated if launch == "simulated" else _run_processes
    yield Injection("nothing (must pass)", partial(_check_pass, run, platform))
    rank_faults = _RANK_FAULTS if launch == "simulated" else {**_RANK_FAULTS, **_PROCESS_FAULTS}
    for name, (fault, words) in rank_faults.items():
        yield Injection(name, partial(_check_report, run, platform, fault, words))
    if launch == "processes":
        yield Injection("lost coverage", partial(_check_lost_coverage, platform))
        return
    for model_fault in FAULTS:
        yield Injection(f"wrong model: {model_fault}", partial(_check_divergence, platform, model_fault))


def _run_simulated(platform: str, fault: _RankFault | None, timeout: float) -> Exception | None:
    try:
        simulate(rank_faults.run_rank_with_fault, _RANKS, platform, (platform, fault), timeout=timeout)
    except RankFailedError as failure:
        return failure
    return None


def _run_processes(platform: str, fault: _RankFault | None, timeout: float) -> Exception | None:
    return _run_live(platform, fault, timeout).failure


def _run_live(platform: str, fault: _RankFault | None, timeout: float) -> LaunchedRun:
    warm_up(platform, "hyper_parallel.core.dtensor.dtensor")
    return run_launched(pack((rank_faults.run_rank_with_fault, (platform, fault))), _RANKS, platform, timeout)


def _check_pass(run: _Run, platform: str) -> tuple[bool, str]:
    failure = run(platform, None, _TIMEOUT)
    return failure is None, "passed" if failure is None else str(failure)


def _check_report(run: _Run, platform: str, fault: _RankFault | None, words: tuple[str, ...]) -> tuple[bool, str]:
    failure = run(platform, fault, _HANG_SECONDS if fault is rank_faults.hang else _TIMEOUT)
    if failure is None:
        return False, "nothing was noticed"
    text = str(failure)
    missing = [word for word in words if word not in text]
    if missing:
        return False, f"was noticed, but the report lacks: {', '.join(missing)}\n{text}"
    return True, next(line.strip() for line in text.splitlines() if words[0] in line)


def _check_lost_coverage(platform: str) -> tuple[bool, str]:
    """Kill a rank, which then leaves no coverage data: the ledger of started ranks must show the gap."""
    with tempfile.TemporaryDirectory() as folder, _ledger(folder):
        close_launched_teams()
        _run_live(platform, rank_faults.kill_self, _TIMEOUT)
        launched = {int(path.name): f"rank-{rank}" for rank, path in enumerate(sorted(Path(folder).iterdir()))}
    failures = check_ranks(launched, list(launched)[:-1])
    caught = len(launched) == _RANKS and len(failures) == 1 and not check_ranks(launched, launched)
    return caught, failures[0] if failures else "nothing was noticed"


@contextmanager
def _ledger(folder: str) -> Iterator[None]:
    before = os.environ.get(LEDGER_VARIABLE)
    os.environ[LEDGER_VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(LEDGER_VARIABLE)
        if before is not None:
            os.environ[LEDGER_VARIABLE] = before


def _check_divergence(platform: str, fault: str) -> tuple[bool, str]:
    """Verify a bundled scenario with a model fault: the report must name the fault's module."""
    from hyper_parallel.verify.model.run import verify_scenario
    from hyper_parallel.verify.scenarios import SCENARIOS

    report: Any = verify_scenario(SCENARIOS[1], platform=platform, steps=1, inject=fault)
    module = FAULTS[fault][0]
    if report.ok:
        return False, "every tensor was equal"
    return report.faulty_module == module, f"first divergence in {report.faulty_module}"

"""The harness tested on this machine: each thing that it must catch is made to happen, and must be caught.

One more run per framework, without any fault, must pass: a harness that rejects everything catches everything.
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
from hyper_parallel.transport.live import LiveRun, close_live_teams, run_live, warm_up
from hyper_parallel.transport.pool import LEDGER_VARIABLE
from hyper_parallel.transport.shipping import pack
from hyper_parallel.verify import _injected
from hyper_parallel.verify.coverage.gates import check_ranks
from hyper_parallel.verify.faults import FAULTS
from hyper_parallel.verify.simulate import simulate

__all__ = ["LAUNCHES", "Injection", "Result", "injections"]

LAUNCHES = ("simulated", "processes")

_RANKS = 3
_HANG_SECONDS = 2.0
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Result:
    """What became of one injection.

    Attributes:
        name: what was injected.
        caught: whether it was noticed, and told with what is expected.
        told: the words with which it was told, or those that came instead.
        seconds: until it was told.
    """

    name: str
    caught: bool
    told: str
    seconds: float


@dataclass(frozen=True)
class Injection:
    """Something that must be caught: call :meth:`run`."""

    name: str
    inject: Callable[[], tuple[bool, str]]

    def run(self) -> Result:
        """Make it happen."""
        start = time.monotonic()
        caught, told = self.inject()
        return Result(self.name, caught, told, time.monotonic() - start)


# Name: what the culprit does where the others sum three numbers, and the words that must be told.
_DEEDS: dict[str, tuple[Callable[[Transport], None], tuple[str, ...]]] = {
    # First, on ranks that the good run has warmed up: what they import counts as time.
    "rank hangs": (_injected.hang, ("did not finish within 2 s", "in hang", "for ranks [1")),
    "rank raises": (
        _injected.throw,
        (f"rank {_injected.CULPRIT} of {_RANKS} failed", "ArithmeticError: injected on rank 1"),
    ),
    "mismatched operation": (
        _injected.join_barrier,
        ("disagree about the operation", f"rank {_injected.CULPRIT}: barrier()", ".py:"),
    ),
    "mismatched shape": (partial(_injected.reduce, size=4), ("disagree about the shape", "f32[4]", ".py:")),
    "mismatched dtype": (partial(_injected.reduce, dtype="int32"), ("disagree about the dtype", "i32[3]", ".py:")),
    "mismatched reduction": (
        partial(_injected.reduce, op="max"),
        ("disagree about the reduction", "f32[3], max", ".py:"),
    ),
    "collective left out": (
        _injected.nothing,
        (f"rank {_injected.CULPRIT} returned without joining", "all_reduce(f32[3], sum)"),
    ),
}
_DEATHS: dict[str, tuple[Callable[[Transport], None], tuple[str, ...]]] = {
    "rank calls os._exit": (_injected.leave, (f"rank {_injected.CULPRIT} died with exit code 3", "in leave")),
    "rank gets SIGKILL": (_injected.kill, (f"rank {_injected.CULPRIT} died with exit code -9",)),
}


# -- injections ------------------------------------------------------------------------------------------------------


def injections(platform: str, launch: str) -> Iterator[Injection]:
    """Everything that must be caught on a framework and launch, and first what must pass."""
    run = _simulated if launch == "simulated" else _processes
    yield Injection("nothing (must pass)", partial(_passes, run, platform))
    deeds = _DEEDS if launch == "simulated" else {**_DEEDS, **_DEATHS}
    for name, (deed, words) in deeds.items():
        yield Injection(name, partial(_fails, run, platform, deed, words))
    if launch == "processes":
        yield Injection("lost coverage", partial(_loses_coverage, platform))
        return
    for fault in FAULTS:
        yield Injection(f"wrong model: {fault}", partial(_diverges, platform, fault))


def _simulated(platform: str, deed: Callable[[Transport], None] | None, timeout: float) -> Exception | None:
    try:
        simulate(_injected.on_rank, _RANKS, platform, (platform, deed), timeout=timeout)
    except RankFailedError as failure:
        return failure
    return None


def _processes(platform: str, deed: Callable[[Transport], None] | None, timeout: float) -> Exception | None:
    return _live(platform, deed, timeout).failure


def _live(platform: str, deed: Callable[[Transport], None] | None, timeout: float) -> LiveRun:
    for module in ("hyper_parallel.verify._injected", f"hyper_parallel.platform.{platform}.platform"):
        warm_up(platform, module)
    return run_live(pack((_injected.on_rank, (platform, deed))), _RANKS, platform, timeout)


def _passes(run: Callable[..., Exception | None], platform: str) -> tuple[bool, str]:
    failure = run(platform, None, _TIMEOUT)
    return failure is None, "passed" if failure is None else str(failure)


def _fails(
    run: Callable[..., Exception | None], platform: str, deed: Callable[[Transport], None], words: tuple[str, ...]
) -> tuple[bool, str]:
    failure = run(platform, deed, _HANG_SECONDS if deed is _injected.hang else _TIMEOUT)
    if failure is None:
        return False, "nothing was noticed"
    text = str(failure)
    missing = [word for word in words if word not in text]
    if missing:
        return False, f"was noticed, but not told: {', '.join(missing)}\n{text}"
    return True, next(line.strip() for line in text.splitlines() if words[0] in line)


def _loses_coverage(platform: str) -> tuple[bool, str]:
    """A rank that is killed leaves no data: the ledger knows that it was started."""
    with tempfile.TemporaryDirectory() as folder, _ledger(folder):
        close_live_teams()
        _live(platform, _injected.kill, _TIMEOUT)
        launched = {int(path.name): f"rank-{place}" for place, path in enumerate(sorted(Path(folder).iterdir()))}
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


def _diverges(platform: str, fault: str) -> tuple[bool, str]:
    """A seeded fault in the embedded model: the verifier must name the module."""
    from hyper_parallel.verify.model import verify_scenario
    from hyper_parallel.verify.scenarios import SCENARIOS

    report: Any = verify_scenario(SCENARIOS[1], platform=platform, steps=1, inject=fault)
    module = FAULTS[fault][0]
    if report.ok:
        return False, "every tensor was equal"
    return report.faulty_module == module, f"first divergence in {report.faulty_module}"

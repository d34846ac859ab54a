"""The library's own code, changed, on trial: what each module is held against, and whether that notices.

Every change runs in a process of its own, forked from one that has all that the changes share and has dispatched
nothing. The trial that is likeliest to notice comes first, and the first that does ends it.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np

from hyper_parallel.verify.ops.mutation import Verdict
from hyper_parallel.verify.ops.sources import SourceMutant, applied, source_mutants
from hyper_parallel.verify.ops.trials.functions import functions_noticed
from hyper_parallel.verify.ops.trials.prices import Prices, choice_prices, efforts, plan_prices, plans_come_in_time
from hyper_parallel.verify.ops.trials.reasons import reason_of
from hyper_parallel.verify.ops.trials.scenarios import SCENARIOS
from hyper_parallel.verify.ops.trials.stage import Stage
from hyper_parallel.verify.redistribution import first_wrong
from hyper_parallel.verify.simulate import simulate

__all__ = ["SOURCES", "judged", "noticed"]

Trial = Callable[[], Iterator[str]]

_PLATFORM = "torch"
_PROCESSOR_SECONDS = 90  # of a change; the library as it is takes a tenth
_SECONDS = 500.0  # by the clock, of a busy machine; who loops for ever has used up his processor's before
_MESHES = ((2,), (3,))


def _scenarios() -> Iterator[str]:
    for mesh in _MESHES:
        for scenario in SCENARIOS:
            simulate(_on_stage, int(np.prod(mesh)), _PLATFORM, (scenario, mesh))
    yield from ()


def _on_stage(scenario: Callable[[Stage], None], mesh: tuple[int, ...]) -> None:
    scenario(Stage(mesh))


def _moves(*meshes: tuple[int, ...], targets: int | None = None) -> Iterator[str]:
    for mesh in meshes:
        yield first_wrong(_PLATFORM, mesh, targets=targets)


def _prices(of: Callable[[], dict[str, Prices]]) -> Iterator[str]:
    before = _kept(of)
    for name, price in of().items():
        if price != before[name]:
            yield f"{name}: {price}, {before[name]} before"


@lru_cache
def _kept(of: Callable[[], dict[str, Prices]]) -> dict[str, Prices]:
    """As they are before anything is changed."""
    return of()


_REDISTRIBUTION: tuple[Trial, ...] = (
    partial(_moves, (3,)), _scenarios, partial(_prices, plan_prices), partial(_moves, (2,), (4,)),
    partial(_moves, (2, 3), (2, 2), targets=6), functions_noticed,
)  # fmt: skip
# Values hold whatever is sent, so prices notice most of what slips there.
_SEARCH: tuple[Trial, ...] = (
    plans_come_in_time, partial(_prices, plan_prices), partial(_prices, efforts), *_REDISTRIBUTION,
)  # fmt: skip
_DISPATCH: tuple[Trial, ...] = (_scenarios, partial(_prices, choice_prices), functions_noticed)

SOURCES: dict[str, tuple[Trial, ...]] = {
    **{f"hyper_parallel.core.dtensor.{name}": _REDISTRIBUTION
       for name in ("steps", "transition", "redistribute")},
    "hyper_parallel.core.dtensor.cheapest_steps": _SEARCH,
    **{f"hyper_parallel.core.shard.{name}": _DISPATCH
       for name in ("dispatch", "executor", "op_plan", "entry", "strategy")},
}  # fmt: skip
"""Modules whose functions are changed, and what they are held against."""


def judged(platform: str, op: str, seed: int) -> Verdict:
    """The verdict on ``module#number``: a mutant by its number among those that ``seed`` shuffled.

    The first one of each kind of trial also says whether the library as it is passes.
    """
    module, _, number = op.partition("#")
    found = _shuffled(module, seed)
    if int(number) >= len(found):
        return Verdict(op, platform, generated=len(found))
    mutant, trials = found[int(number)], SOURCES[module]
    _keep(trials)
    if number == "0" and module == next(one for one, held in SOURCES.items() if held is trials):
        before = noticed(None, trials)
        if before:
            return Verdict(op, platform, "none", "the library as it is", "broken", before, len(found))
    return _verdict(op, platform, mutant, noticed(mutant, trials), len(found))


@lru_cache
def _shuffled(module: str, seed: int) -> list[SourceMutant]:
    found = source_mutants(module)
    return [found[int(index)] for index in np.random.default_rng(seed).permutation(len(found))]


def _keep(trials: tuple[Trial, ...]) -> None:
    for one in trials:
        if isinstance(one, partial) and one.func is _prices:
            _kept(*one.args)


def _verdict(op: str, platform: str, mutant: SourceMutant, what: str, count: int) -> Verdict:
    said = partial(Verdict, op, platform, mutant.kind, mutant.change, generated=count)
    if what in (_SAME, _LATE):  # a busy machine notices nothing
        return said(outcome="equivalent" if what == _SAME else "survived", detail=what)
    if what:
        return said(outcome="killed", detail=what)
    reason = reason_of(mutant)
    return said(outcome="equivalent" if reason else "survived", detail=reason or "all trials")


_SAME, _LATE = "the same code", "not finished"


def noticed(mutant: SourceMutant | None, trials: tuple[Trial, ...]) -> str:
    """What a forked process finds with ``mutant`` in the library, or nothing; it does not come back to say so."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _try(mutant, trials, write)
    os.close(write)
    text = _heard(child, read)
    os.close(read)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 and text != _LATE else text


def _heard(child: int, read: int) -> str:
    deadline, data = time.monotonic() + _SECONDS, b""
    while select.select([read], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        part = os.read(read, 65536)
        if not part:
            return data.decode(errors="replace")
        data += part
    os.kill(child, signal.SIGKILL)
    return _LATE


def _try(mutant: SourceMutant | None, trials: tuple[Trial, ...], write: int) -> None:
    what = "it ended in no way known"
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
        what = _found(mutant, trials)
    except BaseException as error:  # noqa: BLE001 - whatever it raises, nobody overlooks it
        cause = error.__cause__ or error
        what = f"{type(cause).__name__}: {cause}"
    finally:
        os.write(write, what[:2000].encode())
        os._exit(0)


def _found(mutant: SourceMutant | None, trials: tuple[Trial, ...]) -> str:
    if mutant is not None and not applied(mutant):
        return _SAME
    for trial in trials:
        for what in trial():
            if what:
                return what
    return ""

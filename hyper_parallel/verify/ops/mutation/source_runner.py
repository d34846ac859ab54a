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
from functools import lru_cache, partial

import numpy as np

from hyper_parallel.verify.ops.mutation.report import MutantResult
from hyper_parallel.verify.ops.mutation.source_mutants import (
    SourceMutant,
    apply_mutant,
    equivalence_reason,
    source_mutants,
)
from hyper_parallel.verify.ops.mutation.suite.checks import MODULE_CHECKS, Check, keep_costs

__all__ = ["judged", "noticed"]

_PROCESSOR_SECONDS = 90  # of a change; the library as it is takes a tenth
_SECONDS = 500.0  # by the clock, of a busy machine; who loops for ever has used up his processor's before


def judged(platform: str, op: str, seed: int) -> MutantResult:
    """The verdict on ``module#number``: a mutant by its number among those that ``seed`` shuffled.

    The first one of each kind of trial also says whether the library as it is passes.
    """
    module, _, number = op.partition("#")
    found = _shuffled(module, seed)
    if int(number) >= len(found):
        return MutantResult(op, platform, generated=len(found))
    mutant, trials = found[int(number)], MODULE_CHECKS[module]
    keep_costs(trials)
    if number == "0" and module == next(one for one, held in MODULE_CHECKS.items() if held is trials):
        before = noticed(None, trials)
        if before:
            return MutantResult(op, platform, "none", "the library as it is", "broken", before, len(found))
    return _verdict(op, platform, mutant, noticed(mutant, trials), len(found))


@lru_cache
def _shuffled(module: str, seed: int) -> list[SourceMutant]:
    found = source_mutants(module)
    return [found[int(index)] for index in np.random.default_rng(seed).permutation(len(found))]


def _verdict(op: str, platform: str, mutant: SourceMutant, what: str, count: int) -> MutantResult:
    said = partial(MutantResult, op, platform, mutant.kind, mutant.change, generated=count)
    if what in (_SAME, _LATE):  # a busy machine notices nothing
        return said(outcome="equivalent" if what == _SAME else "survived", detail=what)
    if what:
        return said(outcome="killed", detail=what)
    reason = equivalence_reason(mutant)
    return said(outcome="equivalent" if reason else "survived", detail=reason or "all trials")


_SAME, _LATE = "the same code", "not finished"


def noticed(mutant: SourceMutant | None, trials: tuple[Check, ...]) -> str:
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


def _try(mutant: SourceMutant | None, trials: tuple[Check, ...], write: int) -> None:
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


def _found(mutant: SourceMutant | None, trials: tuple[Check, ...]) -> str:
    if mutant is not None and not apply_mutant(mutant):
        return _SAME
    for trial in trials:
        for what in trial():
            if what:
                return what
    return ""

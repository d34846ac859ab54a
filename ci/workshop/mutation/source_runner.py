"""Runs mutants of the library's own code: whether the suite notices them.

Every mutant runs in a process of its own, forked from one that has computed what mutants share and has dispatched
nothing. The check that most likely notices comes first, and the first that does ends the process.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from functools import lru_cache, partial

import numpy as np

from workshop.mutation.report import MutantResult
from workshop.mutation.source_mutants import (
    SourceMutant,
    apply_mutant,
    equivalence_reason,
    source_mutants,
)
from workshop.mutation.suite.checks import MODULE_CHECKS, Check, keep_costs

__all__ = ["run_in_fork", "run_source_mutant"]

_PROCESSOR_SECONDS = 90  # per mutant; the unchanged library takes a tenth
_SECONDS = 500.0  # wall time, for a busy machine; an endless loop reaches the processor's limit first
_UNCHANGED, _UNFINISHED = "the same code", "not finished"


def run_source_mutant(platform: str, op: str, seed: int) -> MutantResult:
    """Return the result of mutant ``module#number``, a number in the order that ``seed`` shuffles.

    The first mutant of each kind of suite also runs the suite on the unchanged library, which must pass.
    """
    module, _, number = op.partition("#")
    mutants = _shuffled(module, seed)
    if int(number) >= len(mutants):
        return MutantResult(op, platform, generated=len(mutants))
    mutant, checks = mutants[int(number)], MODULE_CHECKS[module]
    keep_costs(checks)
    if number == "0" and module == next(name for name, suite in MODULE_CHECKS.items() if suite is checks):
        failure = run_in_fork(None, checks)
        if failure:
            return MutantResult(op, platform, "none", "the library as it is", "broken", failure, len(mutants))
    return _result(op, platform, mutant, run_in_fork(mutant, checks), len(mutants))


@lru_cache
def _shuffled(module: str, seed: int) -> list[SourceMutant]:
    mutants = source_mutants(module)
    return [mutants[int(index)] for index in np.random.default_rng(seed).permutation(len(mutants))]


def _result(op: str, platform: str, mutant: SourceMutant, failure: str, count: int) -> MutantResult:
    result = partial(MutantResult, op, platform, mutant.kind, mutant.change, generated=count)
    if failure == _UNCHANGED:
        return result(outcome="equivalent", detail=failure)
    if failure == _UNFINISHED:  # a busy machine notices nothing
        return result(outcome="survived", detail=failure)
    if failure:
        return result(outcome="killed", detail=failure)
    reason = equivalence_reason(mutant)
    return result(outcome="equivalent" if reason else "survived", detail=reason or "all checks")


def run_in_fork(mutant: SourceMutant | None, checks: tuple[Check, ...]) -> str:
    """Return the first failure of ``checks`` in a forked process with ``mutant`` in the library, or nothing."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _run_child(mutant, checks, write)
    os.close(write)
    text = _read_until_closed(child, read)
    os.close(read)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 and text != _UNFINISHED else text


def _read_until_closed(child: int, read: int) -> str:
    deadline, data = time.monotonic() + _SECONDS, b""
    while select.select([read], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        part = os.read(read, 65536)
        if not part:
            return data.decode(errors="replace")
        data += part
    os.kill(child, signal.SIGKILL)
    return _UNFINISHED


def _run_child(mutant: SourceMutant | None, checks: tuple[Check, ...], write: int) -> None:
    failure = "the process ended in an unknown way"
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
        failure = _first_failure(mutant, checks)
    except BaseException as error:  # noqa: BLE001 - any exception notices the mutant
        cause = error.__cause__ or error
        failure = f"{type(cause).__name__}: {cause}"
    finally:
        os.write(write, failure[:2000].encode())
        os._exit(0)


def _first_failure(mutant: SourceMutant | None, checks: tuple[Check, ...]) -> str:
    if mutant is not None and not apply_mutant(mutant):
        return _UNCHANGED
    for check in checks:
        for failure in check():
            if failure:
                return failure
    return ""

"""Checks that a reference is deterministic up to rounding: two unchanged runs give the same values.

Some kernels sum in a different order in each run, so two runs differ by an ULP even if all seeds are equal. Random
draws differ by far more. So the first value that differs may be off only by a few units of its dtype. All later values
must agree in half of their digits and be within the tolerances that the perturbed repeats measured. The perturbed
repeats run the same kernels, so the tolerances include this noise. The unperturbed repetition does not widen them.

The tolerances alone are not sufficient: if a program has unseeded draws, its perturbed repeats differ as much as its
unperturbed repetition. Rounding loses less than half of the digits in a few steps, and a draw changes more than that.
Weights and optimizer states are exempt, because AdamW makes a full step in the direction of rounding noise. The effect
of a draw on them is detected in the next outputs.
"""

from __future__ import annotations

import numpy as np

from hyper_parallel.verify.engine.bounds import Bounds
from hyper_parallel.verify.engine.distance import within
from hyper_parallel.verify.engine.noise import unit
from hyper_parallel.verify.engine.store import largest, same_values
from hyper_parallel.verify.frameworks.contract.records import Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import Program

__all__ = ["FEW_UNITS", "ROUNDING", "check_deterministic", "check_rounding"]

FEW_UNITS = 16.0
"""Largest error of the first value that differs, in units in the last place of its array's largest number."""

_SLOWER = 4
"""Divisor of the number of steps of a run on one rank, for a proposed number of steps: simulated ranks take longer."""

_UPDATED = ("state", "weight", "buffer", "saved")  # kinds that are recorded after the optimizer's step

ROUNDING = "differs from run to run"
"""Key in ``Run.settings`` of a reference: description of the first value that the repetition rounded differently."""


def check_deterministic(program: Program, first: Run, second: Run) -> str:
    """Check that two runs of the reference left the same values, or differ only by rounding.

    Returns:
        the first value that differs, and the difference in units in the last place; empty if all are bitwise equal.

    Raises:
        InputError: the first value that differs is off by more than :data:`FEW_UNITS`, is an initial weight, is not a
            floating number, or is missing in one of the runs.
    """
    own, other = first.ranks[0].records, second.ranks[0].records
    if len(own) == len(other) and all(mine.key == again.key for mine, again in zip(own, other, strict=True)):
        pair = next(((mine, again) for mine, again in zip(own, other, strict=True) if not _same(mine, again)), None)
        if pair is None:
            return ""
        units = _units(*pair)
        if units <= FEW_UNITS and pair[0].step >= 0:
            return f"{_words(pair[0])} by {units:.2g} units in the last place"
        raise _not_deterministic(program, _words(pair[0]))
    for mine, again in zip(own, other, strict=False):
        if mine.key != again.key or not _same(mine, again):
            raise _not_deterministic(program, _words(mine))
    steps = [int(run.ranks[0].notes.get("optimizer steps", 0)) for run in (first, second)]
    if min(steps) and steps[0] != steps[1]:
        fewer = f"--steps {max(1, min(steps) // _SLOWER)}"
        raise InputError(
            f"{program.name} takes {steps[0]} optimizer steps in one run and {steps[1]} in another, and the steps that "
            "both take are equal: something other than the training ends it, such as a time limit; give it a number of "
            f"steps that every run takes, such as {fewer}"
        )
    raise _not_deterministic(program, f"the number of recorded values ({len(own)} and {len(other)})")


def check_rounding(program: Program, reference: Run, again: Run, bounds: Bounds) -> None:
    """Check that all differences of a repetition are within the tolerances of a correct parallel run.

    Args:
        program: the program of both runs.
        reference: run of the program on one rank.
        again: the same run, repeated without changes.
        bounds: tolerances from the perturbed repeats.

    Raises:
        InputError: a value exceeds its tolerance.
    """
    for mine, other in zip(reference.ranks[0].records, again.ranks[0].records, strict=True):
        if not _same(mine, other) and not (
            (mine.kind in _UPDATED or _units(mine, other, bounds.floor(mine.key)) <= _half_of_the_digits(mine))
            and within(other.value, mine.value, bounds.allowed(mine.key))
        ):
            raise _not_deterministic(program, f"{_words(mine)}, by more than rounding does,")


def _same(mine: Record, again: Record) -> bool:
    return same_values(mine.value, again.value) or np.array_equal(
        mine.value, again.value, equal_nan=mine.value.dtype.kind in "fc"
    )


def _half_of_the_digits(record: Record) -> float:
    """Return the number of units in the last place that make up half of the digits of a value's dtype."""
    return float(unit(np.asarray(record.value), record.dtype) ** -0.5)


def _units(mine: Record, again: Record, floor: float = 0.0) -> float:
    """Return the difference of two arrays in ULPs of the largest number; infinity if it cannot be rounding.

    Args:
        mine: a value.
        again: the same value in the other run.
        floor: smallest magnitude that is used as the largest number.
    """
    value, other = np.asarray(mine.value), np.asarray(again.value)
    if value.dtype.kind not in "fc" or value.shape != other.shape or value.dtype != other.dtype:
        return np.inf
    finite = np.isfinite(value)
    if not np.array_equal(finite, np.isfinite(other)) or not np.array_equal(
        value[~finite], other[~finite], equal_nan=True
    ):
        return np.inf
    wide = np.complex128 if value.dtype.kind == "c" else np.float64
    off = np.abs(value[finite].astype(wide) - other[finite].astype(wide)).max()
    return float(off / (unit(value) * max(largest(value), floor) or np.finfo(np.float64).tiny))


def _words(record: Record) -> str:
    return f"{record.kind} {record.name!r} of step {record.step}"


def _not_deterministic(program: Program, what: str) -> InputError:
    return InputError(
        f"{program.name} is not deterministic on one rank: run twice, {what} differs; seed every generator that it "
        "uses (torch.manual_seed, mindspore.set_seed, random.seed, numpy.random.seed), and keep time and object ids "
        "out of the training"
    )

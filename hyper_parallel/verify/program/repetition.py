"""Checks that a reference is deterministic up to rounding: two unchanged runs leave the same values.

Some kernels sum in another order in each run, so two equal runs differ in the last place, whatever the seed. Random
draws differ by far more. So the first value that differs may be off by a few units of its dtype only, and all later
values must agree in half of their digits and be within the bounds that the perturbed repeats measured. Those repeats
run the same kernels, so the bounds include this noise; the repetition itself widens no bound.

The bounds alone are not enough: the repeats of a program with unseeded draws differ as much as its repetition. Half of
the digits is more than rounding loses in a few steps, and less than a draw changes. Weights and optimizer states are
exempt: AdamW makes a full step in the direction of rounding noise; a draw's effect on them shows in the next outputs.
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
"""How many units in the last place of its array's largest number the first value that differs may be off."""

_SLOWER = 4
"""How many times fewer steps are proposed than a run on one rank makes: simulated ranks take longer."""

_UPDATED = ("state", "weight", "buffer", "saved")  # kinds that are recorded when the optimizer has stepped

ROUNDING = "differs from run to run"
"""``Run.settings`` of a reference: the first value that its repetition rounded otherwise, in words."""


def check_deterministic(program: Program, first: Run, second: Run) -> str:
    """Check that two runs of the reference left the same values, or differ as rounding may.

    Returns:
        the first value that differs, and by how many units in the last place; empty if all are equal bit for bit.

    Raises:
        InputError: it differs by more than :data:`FEW_UNITS`, is an initial weight, not a floating number, or missing
            in one of the runs.
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
            f"{program.name} makes {steps[0]} optimizer steps in one run and {steps[1]} in another, and computes the "
            f"same in those that both make: something else than the training ends it, such as time; give it a number "
            f"of steps that every run makes, such as {fewer}"
        )
    raise _not_deterministic(program, f"the number of recorded values ({len(own)} and {len(other)})")


def check_rounding(program: Program, reference: Run, again: Run, bounds: Bounds) -> None:
    """Check that a repetition which differs is nowhere further off than a correct parallel run may be.

    Args:
        program: what ran.
        reference: its run on one rank.
        again: the same without a change.
        bounds: from the perturbed repeats.

    Raises:
        InputError: a value is further off.
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
    """Return the difference of two arrays in units of their largest number; infinity if it is more than rounding.

    Args:
        mine: a value.
        again: the same of the other run.
        floor: least magnitude that counts as the largest number.
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

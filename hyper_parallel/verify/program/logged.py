"""`--logged`: compares the numbers that rank 0 prints or writes to text files with those of the single device.

Lines are aligned by their text without numbers. A number is compared under four conditions: it is decimal; it is nearly
equal in the reference and its perturbed repeats, unlike times; it changes during the run, unlike settings, or is a
recorded number; and no unit of time, rate or memory is next to it in the line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Run
from hyper_parallel.verify.program.printed import PRINTED, WRITTEN
from hyper_parallel.verify.program.reference import Reference
from hyper_parallel.verify.program.report import HardenedCase

__all__ = ["LoggedNumber", "compare_logged", "logged_numbers"]

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+)(?![\w]*\.?\d)")
_COST = re.compile(
    r"time|elapsed|eta\b|took|sec|duration|latency|date|stamp|perf|speed|throughput|per_s|/s\b|tok|tps|flops|mfu|mem|"
    r"\b[kmgt]i?b\b|bytes|samples",
    re.IGNORECASE,
)
"""Words directly before a number that mark it as a time, a rate, a count or a size."""

_UNIT = re.compile(r"\s*(?:[muµn]?s|min|h|sec\w*|\w*/\w+|[kmgt]?i?b|tok\w*|samples)\b", re.IGNORECASE)
"""Words directly after a number that mark it as a time, a rate, a count or a size."""

_WINDOWS = 32
"""Number of losses over which a mean may be logged; the mean of all losses so far is tried as well."""

_DIGITS = 3
_STABLE, _MULTIPLE, _ROUNDING = 1e-3, 16.0, 1e-5
_SAME_FACTOR = 1e-3

Key = tuple[str, str, int, int]


@dataclass(frozen=True)
class LoggedNumber:
    """A decimal number in a line.

    Attributes:
        value: the number as a float.
        unit: unit of the last printed digit.
        step: number of optimizer steps completed when the line was printed; -1 in a file.
        digits: number of printed significant digits.
        cost: whether a unit of time, rate or memory is next to the number.
    """

    value: float
    unit: float
    step: int
    digits: int
    cost: bool


def compare_logged(reference: Reference, run: Run, notes: list[str], *, strict: bool) -> HardenedCase | None:
    """Return the case that compares logged numbers; None if no number could be compared.

    Args:
        reference: the reference, with the lines of its repeats.
        run: run of the ranks, whose training is equal to the reference's.
        notes: list to which differences that are not errors are added.
        strict: whether a different number that no hypothesis explains counts as an error.
    """
    own, ranks = reference.run.ranks[0], run.ranks
    first, other = logged_numbers(own.notes), logged_numbers(ranks[0].notes)
    wrong: dict[Key, float] = {}
    chosen: dict[Key, float] = {}
    while True:
        repeats = [logged_numbers(printed) for printed in reference.printed]
        chosen = dict(_comparable(first, repeats, own))
        chosen = {key: allowed for key, allowed in chosen.items() if key in other}
        wrong = {key: allowed for key, allowed in chosen.items() if not _equal(other[key], first[key], allowed)}
        own_loss = all(_is_own_loss(first[key], other[key], own, ranks[0]) for key in wrong)
        if own_loss or not reference.widen(lambda: False):
            break
    if not chosen:
        return None
    verdict = Verdict(run.world_size)
    series: dict[tuple[str, str, int], list[Key]] = {}
    for key in wrong:
        series.setdefault((key[0], key[1], key[3]), []).append(key)
    for keys in series.values():
        _judge(verdict, keys, (first, other), (own, ranks[0]), run.world_size, strict=strict)
    compared = len(chosen) - len(wrong) + len(verdict.differences)
    notes += verdict.notes
    if not compared:
        return None
    equal = (min(1.0, abs(other[key].value - first[key].value) / chosen[key]) for key in chosen if key not in wrong)
    verdict = replace(
        verdict, checked=compared, counts=Counter(logged=compared), largest=max(equal, default=0.0), notes=[]
    )  # fmt: skip
    words = (
        "numbers that rank 0 prints or writes to text files, against those of the single device, to the digits shown"
    )
    return HardenedCase([words], verdict, title="logged")


def logged_numbers(notes: Mapping[str, Any]) -> dict[Key, LoggedNumber]:
    """Return the decimal numbers of a rank's lines, by source, text without numbers, occurrence, and place in the text.

    Args:
        notes: notes of the rank.
    """
    sources = {"": notes.get(PRINTED, ()), **(notes.get(WRITTEN) or {})}
    numbers: dict[Key, LoggedNumber] = {}
    for source, lines in sources.items():
        counts: dict[str, int] = {}
        for step, line in lines:
            text = _NUMBER.sub("#", line).strip()
            occurrence = counts.get(text, 0)
            counts[text] = occurrence + 1
            for place, match in enumerate(_NUMBER.finditer(line)):
                number = _number(line, match, step)
                if number is not None:
                    numbers[source, text, occurrence, place] = number
    return numbers


def _number(line: str, match: re.Match[str], step: int) -> LoggedNumber | None:
    """Return a number with a decimal point or an exponent; None for an integer."""
    mantissa, _, exponent = match.group().lower().partition("e")
    if "." not in mantissa and not exponent:
        return None
    value = float(match.group())
    decimals = len(mantissa.partition(".")[2])
    digits = mantissa.lstrip("+-").replace(".", "").lstrip("0")
    before = _NUMBER.split(line[: match.start()])[-1]
    cost = _COST.search(before) is not None or _UNIT.match(line, match.end()) is not None
    return LoggedNumber(value, 10.0 ** (int(exponent or 0) - decimals), step, len(digits), cost)


def _comparable(
    first: Mapping[Key, LoggedNumber], repeats: Sequence[Mapping[Key, LoggedNumber]], own: RankRecords
) -> Iterator[tuple[Key, float]]:
    """Yield the numbers that can be compared, each with its tolerance."""
    values: dict[tuple[str, str, int], set[float]] = {}
    for key, number in first.items():
        values.setdefault((key[0], key[1], key[3]), set()).add(number.value)
    recorded = [
        float(np.asarray(record.value).item()) for record in own.records
        if record.kind in ("loss", "norm", "value") and np.size(record.value) == 1
        and np.asarray(record.value).dtype.kind == "f"
    ]  # fmt: skip
    unstable: set[tuple[str, str, int]] = set()
    moved: dict[Key, float] = {}
    for key, number in first.items():
        others = [repeat[key].value for repeat in repeats if key in repeat]
        moved[key] = max((abs(other - number.value) for other in others), default=0.0)
        if len(others) < len(repeats) or moved[key] > max(1.5 * number.unit, _STABLE * abs(number.value)):
            unstable.add((key[0], key[1], key[3]))
    for key, number in first.items():
        slot = (key[0], key[1], key[3])
        if slot in unstable or number.cost or number.digits < _DIGITS or not repeats:
            continue
        if len(values[slot]) > 1 or any(abs(number.value - known) <= number.unit for known in recorded):
            yield key, 1.01 * number.unit + _MULTIPLE * moved[key] + _ROUNDING * abs(number.value)


def _equal(actual: LoggedNumber, expected: LoggedNumber, allowed: float) -> bool:
    return abs(actual.value - expected.value) <= max(allowed, 1.01 * actual.unit)


def _judge(
    verdict: Verdict,
    keys: Sequence[Key],
    numbers: tuple[Mapping[Key, LoggedNumber], Mapping[Key, LoggedNumber]],
    records: tuple[RankRecords, RankRecords],
    size: int,
    *,
    strict: bool,
) -> None:
    """Add the wrong numbers at one place of a repeated line to the verdict, as a difference or as a note."""
    source, text, occurrence, place = keys[0]
    expected, actual = numbers[0][keys[0]], numbers[1][keys[0]]
    name = f"{text!r}, number {place + 1}" + (f", in {source.rpartition('/')[2]}" if source else "")
    pairs = [(numbers[0][key], numbers[1][key]) for key in keys]
    if all(_is_own_loss(*pair, *records) for pair in pairs):
        verdict.notes.append(
            f"logged {name}: rank 0 logs the loss of its own samples ({actual.value:.9g}, the single device "
            f"{expected.value:.9g})"
        )
        return
    cause = _cause(pairs, records, size)
    why = f"rank 0 logs {actual.value:.9g}, the single device {expected.value:.9g}"
    if cause.kind == "unexplained" and not strict:
        verdict.notes.append(f"logged {name}: {why}; nothing explains it, it may be a number of rank 0's own part")
        return
    error = abs(actual.value - expected.value) / (abs(expected.value) or 1.0)
    step = max(expected.step - 1, 0)
    verdict.differences.append(
        Difference("logged", name, "", (0,), step, occurrence, error, expected.unit, why, cause=cause)
    )


def _is_own_loss(expected: LoggedNumber, actual: LoggedNumber, own: RankRecords, rank: RankRecords) -> bool:
    """Return whether both numbers are the same statistic of the losses of their run, such as a mean or a sum."""
    for mine, theirs in zip(_statistics(own, expected.step), _statistics(rank, actual.step), strict=False):
        if _shows(expected, mine) and _shows(actual, theirs):
            return True
    return False


def _statistics(rank: RankRecords, step: int) -> Iterator[float]:
    """Yield statistics of losses that a program may log at a step: means, sums and exponentials of the last losses.

    Args:
        rank: records of the rank that has the losses.
        step: number of completed optimizer steps; the last loss may be that before the last optimizer step. -1 for any
            step.
    """
    losses = [(record.step, float(np.asarray(record.value))) for record in rank.records if record.kind == "loss"]
    for end in range(1, len(losses) + 1):
        if step >= 0 and not step - 1 <= losses[end - 1][0] <= step:
            continue
        for count in range(1, end + 1) if end <= _WINDOWS else (*range(1, _WINDOWS), end):
            total = sum(value for _, value in losses[end - count : end])
            yield from (total / count, total, math.exp(min(total / count, 700.0)))


def _shows(number: LoggedNumber, value: float) -> bool:
    return abs(number.value - value) <= max(number.unit, _ROUNDING * abs(value))


def _cause(
    pairs: Sequence[tuple[LoggedNumber, LoggedNumber]], records: tuple[RankRecords, RankRecords], size: int
) -> Cause:
    """Return why logged numbers differ: they are norms of one rank's shard, or wrong by the number of ranks."""
    if all(_is_own_norm(*pair, *records) for pair in pairs):
        expected, actual = pairs[0]
        return Cause(
            "norm-local",
            evidence=f"{actual.value:.9g} is the norm of the gradients that rank 0 holds, {expected.value:.9g} of all",
        )
    factors = [actual.value / expected.value for expected, actual in pairs if expected.value]
    known = all(
        any(_shows(expected, value) for value in _statistics(records[0], expected.step)) for expected, _ in pairs
    )
    for words, factor in (("the number of ranks", size), ("one over the number of ranks", 1 / size)):
        if known and factors and all(abs(each - factor) <= _SAME_FACTOR * factor for each in factors):
            return Cause(
                "scaled-by-size", evidence=f"{len(factors)} logged losses are {words} times the single device's"
            )
    return Cause("unexplained", evidence="no norm of a part and no number of ranks explains it")


def _is_own_norm(expected: LoggedNumber, actual: LoggedNumber, own: RankRecords, rank: RankRecords) -> bool:
    """Return whether both numbers are norms of their run's gradients in the same step, before clipping."""
    for step in {record.step for record in own.records if record.kind == "gradient"}:
        mine, theirs = _norm(own, step), _norm(rank, step)
        if abs(expected.value - mine) <= max(expected.unit, _SAME_FACTOR * mine) and abs(actual.value - theirs) <= max(
            actual.unit, _SAME_FACTOR * theirs
        ):
            return True
    return False


def _norm(rank: RankRecords, step: int) -> float:
    squares = (
        float(np.square(np.asarray(record.value, np.float64)).sum())
        for record in rank.records
        if record.kind == "gradient" and (record.step, record.call) == (step, 0)
    )
    return math.sqrt(sum(squares))

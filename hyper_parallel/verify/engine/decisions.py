"""Compares choices of top-k, sorting and similar operators as decisions: only near ties may flip.

Such an operator returns indices of scores, which may change if scores change by one ULP. A rank's indices are therefore
right if the scores there equal the scores at the reference's indices, within the tolerance of the scores. Scores form
rows, and each row is one decision. A rank's rows are found among the reference's by their values. If an earlier flip
has changed some rows, the other rows determine the position of all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Bounds, Key
from hyper_parallel.verify.engine.placement import renamed_path
from hyper_parallel.verify.frameworks.contract.records import DECISIONS, Record, Run

__all__ = ["Call", "Decision", "calls_of", "decisions_of"]

_ROWS, _COLUMNS = 64, 16
"""Number of rows and of columns of a rank that are used to find their position."""

_FOUND = 0.5
"""Share of a rank's rows that must equal the reference's at a position to place the rows there."""


@dataclass(frozen=True)
class Decision:
    """The choices of one call of an operator on one rank, and those of the reference for the same rows.

    Attributes:
        rank: number of the rank.
        own: key of the rank's choice, under the rank's own names.
        key: the same key under the reference's names.
        chosen: the rank's indices, one row per decision.
        expected: the reference's indices of the same rows.
        flips: rows whose choice differs, but only between near ties; only choices whose scores are right are judged.
        outside: rows whose choice differs by more than a near tie, although all scores are within their tolerances.
        why: the numbers of the first row of ``outside``.
    """

    rank: int
    own: Key
    key: Key
    chosen: Any
    expected: Any
    flips: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Call:
    """One call of an operator that chooses, such as top-k.

    Attributes:
        own: key of the choice, under the run's own names.
        scores: input of the operator.
        choice: the indices that it returned.
    """

    own: Key
    scores: Any
    choice: Any


def decisions_of(bounds: Bounds, parallel: Run, names: Sequence[Mapping[str, str]]) -> list[Decision]:
    """Return every choice that both the ranks and the reference made.

    Args:
        bounds: tolerances of the reference.
        parallel: the run on all ranks.
        names: for each rank, the reference's name of each renamed module.
    """
    reference = calls_of(bounds.records.values(), {})
    found: list[Decision] = []
    for rank, (records, modules) in enumerate(zip(parallel.ranks, names, strict=True)):
        own = calls_of(records.records, modules)
        places: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        for known in (True, False):  # positions of rows are first found by values, then reused
            for group, calls in own.items():
                if group in reference:
                    found += _compared(bounds, rank, group, calls, reference[group], places, known=known)
    return list({(decision.rank, decision.own): decision for decision in found}.values())


def calls_of(
    records: Iterable[Record], modules: Mapping[str, str], kinds: Sequence[str] = DECISIONS[:2]
) -> dict[tuple[str, int], list[Call]]:
    """Return the calls in order, by name and step.

    Args:
        records: records of one rank.
        modules: the reference's name of each renamed module.
        kinds: kinds of the records of scores and of choices.
    """
    scores: dict[Any, Record] = {}
    calls: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for record in records:
        if record.kind == kinds[0]:
            scores[record.key[1:]] = record  # the key without its kind
        elif record.kind == kinds[1]:
            path, _, operator = record.name.rpartition(" ")
            name = f"{renamed_path(path, modules)} {operator}"
            calls[name, record.step].append(Call(record.key, scores[record.key[1:]].value, record.value))
    return calls


def _compared(
    bounds: Bounds,
    rank: int,
    group: tuple[str, int],
    calls: Sequence[Call],
    reference: Sequence[Call],
    places: Counter[tuple[int, int, tuple[int, ...]]],
    *,
    known: bool,
) -> Iterator[Decision]:
    """Yield the decisions of one name and step on one rank.

    Args:
        bounds: tolerances of the reference.
        rank: number of the rank.
        group: name and step.
        calls: calls of the rank.
        reference: calls of the reference.
        places: how often each selection of rows was found, by the rank's and the reference's number of rows; filled if
            ``known``.
        known: whether rows are found by their values; otherwise they are placed like most decisions with as many rows.
    """
    pairs = [([own], [other]) for own, other in zip(calls, reference, strict=False)]
    unions = [(list(calls), list(reference))]
    for tried in (pairs, unions) if len(calls) == len(reference) else (unions,):
        results = [list(_of_pair(bounds, rank, group, *pair, places, known=known)) for pair in tried]
        if all(results):
            for result in results:
                yield from result
            return


def _of_pair(
    bounds: Bounds,
    rank: int,
    group: tuple[str, int],
    calls: Sequence[Call],
    reference: Sequence[Call],
    places: Counter[tuple[int, int, tuple[int, ...]]],
    *,
    known: bool,
) -> Iterator[Decision]:
    widths = {(np.shape(call.scores)[1], np.shape(call.choice)[1]) for call in (*calls, *reference)}
    if len(widths) > 1:
        return
    own, whole = (np.concatenate([np.asarray(call.scores) for call in each]) for each in (calls, reference))
    expected = np.concatenate([np.asarray(call.choice) for call in reference])
    allowed = np.concatenate([bounds.allowed(("scores", *call.own[1:])) for call in reference])
    if known:
        rows = _place(own, whole, allowed)
        if rows is not None and len(own) < len(whole):
            places[len(own), len(whole), tuple(map(int, rows))] += 1
    else:
        rows = _likely(len(own), len(whole), places)
    if rows is None:
        return
    start = 0
    for call in calls:
        where = rows[start : start + len(np.asarray(call.scores))]
        start += len(where)
        key = ("choice", group[0], group[1], call.own[3])
        yield _judged(rank, call, key, whole[where], allowed[where], expected[where])


def _judged(rank: int, call: Call, key: Key, scores: Any, allowed: Any, expected: Any) -> Decision:
    """Return the decision of one call whose rows in the reference are known."""
    own, chosen = np.asarray(call.scores), np.asarray(call.choice)
    with np.errstate(invalid="ignore"):
        right = (np.abs(own - scores) <= allowed) | (own == scores)
    other = np.flatnonzero((chosen != expected).any(axis=1))
    if not other.size:
        return Decision(rank, call.own, key, chosen, expected)
    here, there, right_here, right_there = (
        np.take_along_axis(array[other], index[other], axis=1)
        for array in (scores, right)
        for index in (chosen, expected)
    )
    slack = np.take_along_axis(allowed[other], chosen[other], axis=1) + allowed[other].max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        tie = (np.abs(here - there) <= slack) | (here == there)
    # a wrong score that enters or leaves the choice shifts the later choices, so these cannot be judged
    judged = right_here & right_there & (chosen != expected)[other]
    near = judged.any(axis=1) & (tie | ~judged).all(axis=1)
    far = right[other].all(axis=1) & ~tie.all(axis=1)
    outside = other[far]
    why = ""
    if outside.size:
        row = int(np.flatnonzero(far)[0])
        place = int(np.flatnonzero(~tie[row])[0])
        why = (
            f"rank {rank} chooses index {int(chosen[other[row], place])} where the single device chooses "
            f"{int(expected[other[row], place])}: their scores are {here[row, place]:.6g} and {there[row, place]:.6g}, "
            f"and rounding moves them by {slack[row, place]:.2g} at most"
        )
    return Decision(
        rank, call.own, key, chosen, expected, tuple(map(int, other[near])), tuple(map(int, outside)), why
    )  # fmt: skip


def _place(own: Any, whole: Any, allowed: Any) -> Any | None:
    """Return which rows of ``whole`` a rank has: a block, or evenly spaced rows; None if too few match."""
    count, total = len(own), len(whole)
    if count > total or not count:
        return None
    some = np.unique(np.linspace(0, count - 1, min(count, _ROWS)).astype(np.int64))
    columns = np.unique(np.linspace(0, own.shape[1] - 1, min(own.shape[1], _COLUMNS)).astype(np.int64))
    few, all_rows, slack = own[np.ix_(some, columns)], whole[:, columns], allowed[:, columns]
    with np.errstate(invalid="ignore"):
        equal = np.array([((np.abs(row - all_rows) <= slack) | (row == all_rows)).all(axis=1) for row in few])
    best, rows = 0.0, None
    for step in {1, max(total // count, 1)}:
        for start in range(total - step * (count - 1)):
            share = float(equal[np.arange(len(some)), start + step * some].mean())
            if share > best:
                best, rows = share, start + step * np.arange(count)
    return rows if best >= _FOUND else None


def _likely(count: int, total: int, places: Counter[tuple[int, int, tuple[int, ...]]]) -> Any | None:
    """Return the rows at which most decisions with this number of rows were found; None if there were none."""
    votes = [(number, rows) for (own, all_rows, rows), number in places.items() if (own, all_rows) == (count, total)]
    return np.array(max(votes)[1]) if votes else None

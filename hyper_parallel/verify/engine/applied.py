"""Hypotheses about targets and masks: they are not the single device's, or ranks have unequal numbers of targets.

A rank's logits or attention scores are found among those of the reference by their values. If they are found,
everything before them is right, so targets or a mask that differ are the first wrong values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.decisions import Call, calls_of
from hyper_parallel.verify.engine.matching import find_part
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import describe
from hyper_parallel.verify.engine.wording import ranks_words
from hyper_parallel.verify.frameworks.contract.records import APPLIED

__all__ = ["other_mask", "other_targets_applied", "weighted_by_targets"]

_SHOWN = 4
"""Largest number of targets or rows that are listed in a cause."""


@dataclass(frozen=True)
class _Applied:
    """The targets or the mask of a call on one rank, and those that the reference applies to the same logits or scores.

    Attributes:
        rank: number of the rank.
        name: module and function that were called.
        number: number of the call in its step.
        own: the rank's targets or mask.
        whole: targets or mask of the reference's call.
        rows: for each element of ``own``, its position in ``whole``.
        where: placement of the rank's logits or scores in the reference's, in words.
    """

    rank: int
    name: str
    number: int
    own: Any
    whole: Any
    rows: Any
    where: str

    @property
    def expected(self) -> Any:
        return self.whole.reshape(-1)[self.rows]


def other_targets_applied(runs: PairedRuns, key: Key, _wrong: Any, _evidence: Any) -> Cause | None:
    """Test whether ranks have the reference's logits, but use targets that are not the reference's in their losses."""
    if key[0] != "loss":
        return None
    differing = [each for each in _applied(runs, key[2]) if each.own.dtype.kind in "iu" and _differs(each)]
    if not differing:
        return None
    first = differing[0]
    wrong = np.flatnonzero(first.own != first.expected)
    own, expected = first.own[wrong], first.expected[wrong]
    ranks = {each.rank for each in differing}
    text = f"{ranks_words(ranks)} {'have' if len(ranks) > 1 else 'has'} the single device's logits with other targets"
    shown = f"{_listed(own)} for {_listed(expected)}"
    text += f": on rank {first.rank}, {wrong.size} of {first.own.size} differ, {shown}"
    return Cause("targets", "", f"{text}{_shifted(first, own, wrong)}")


def weighted_by_targets(runs: PairedRuns, key: Key, _wrong: Any, _evidence: Any) -> Cause | None:
    """Test whether the mean of the ranks' losses, weighted with their numbers of targets, is the reference's loss.

    Which target a loss ignores is not recorded, so each rank's most frequent target and all negative ones are tried.
    """
    ranks = runs.holders(key)
    expected, allowed = float(runs.bounds.reference[key].value), 4 * float(np.max(runs.bounds.allowed(key)))
    losses = [float(runs.value(key, rank)) for rank in ranks if runs.value(key, rank).size == 1]
    targets = [_targets(runs, rank, key[2]) for rank in ranks]
    if key[0] != "loss" or len(losses) < max(2, len(ranks)) or not all(each.size for each in targets):
        return None
    for ignored in (None, *_ignorable(targets)):
        counts = [each.size if ignored is None else int((each != ignored).sum()) for each in targets]
        if len(set(counts)) > 1 and abs(float(np.average(losses, weights=counts)) - expected) <= allowed:
            shown = " : ".join(map(str, counts))
            which = "targets" if ignored is None else f"targets other than {ignored}"
            text = f"the mean of the ranks' losses weighted with their numbers of {which} in the step, {shown}, equals"
            axis = next((axis for axis, groups in runs.axes.sets() if len(groups) == 1), "")
            return Cause("scaled-by-count", axis, f"{text} the reference: each rank divides by its own number")
    return None


def _targets(runs: PairedRuns, rank: int, step: int) -> Any:
    """Return the targets of all losses of a rank in a step."""
    calls = calls_of(runs.parallel.ranks[rank].records, runs.names[rank], APPLIED)
    found = [np.asarray(call.choice) for group, own in calls.items() if group[1] == step for call in own]
    return np.concatenate([np.empty(0, np.int64), *(each.reshape(-1) for each in found if each.dtype.kind in "iu")])


def _ignorable(targets: Sequence[Any]) -> list[int]:
    """Return the targets that a loss may ignore: the most frequent one of each rank, and negative ones."""
    found: set[int] = set()
    for own in targets:
        values, counts = np.unique(own, return_counts=True)
        found |= {int(values[counts.argmax()]), *map(int, values[values < 0])}
    return sorted(found)


def other_mask(runs: PairedRuns, key: Key, _wrong: Any, _evidence: Any) -> Cause | None:
    """Test whether ranks mask attention scores that the reference does not mask, or the reverse.

    Only masks in the module of a wrong output, or in a module inside or around it, are tested.
    """
    module = runs.bounds.reference[key].module if key in runs.bounds.reference else None
    if key[0] != "output" or module is None:
        return None
    for each in _applied(runs, key[2]):
        inside = "" if (path := each.name.rpartition(" ")[0]) == "(model)" else path
        if each.own.dtype.kind == "b" and _is_within(module, inside) and _differs(each):
            wrong, hidden = each.own != each.expected, int((each.own & ~each.expected).sum())
            text = f"in {each.name} on rank {each.rank} (call {each.number + 1} of the step), the scores are the single"
            text += f" device's {each.where}, but {int(wrong.sum())} of {wrong.size} elements of the mask differ"
            return Cause("hidden", "", f"{text}: {hidden} are hidden that the single device keeps")
    return None


def _is_within(module: str, inside: str) -> bool:
    return not inside or f"{module}.".startswith(f"{inside}.") or f"{inside}.".startswith(f"{module}.")


def _differs(each: _Applied) -> bool:
    return not np.array_equal(each.own, each.expected)


def _applied(runs: PairedRuns, step: int) -> Iterator[_Applied]:
    """Yield, rank by rank, the calls of a step whose logits or scores are found in the reference."""
    reference = calls_of(runs.bounds.records.values(), {}, APPLIED)
    for rank, (records, modules) in enumerate(zip(runs.parallel.ranks, runs.names, strict=True)):
        for group, calls in calls_of(records.records, modules, APPLIED).items():
            for number, call in enumerate(calls) if group[1] == step else ():
                found = _found(runs, call, reference.get(group, ()))
                if found is not None:
                    yield _Applied(rank, group[0], number, np.asarray(call.choice), *found)


def _found(runs: PairedRuns, call: Call, reference: Sequence[Call]) -> tuple[Any, Any, str] | None:
    """Return the reference's targets or mask, the positions of the rank there, and their placement in words."""
    numbers = np.asarray(call.scores)
    for other in reference:
        whole, given = np.asarray(other.scores), np.asarray(other.choice)
        match = find_part(numbers, whole, runs.bounds.allowed((APPLIED[0], *other.own[1:])))
        if match is not None and match.unique:
            positions = np.asarray(match.positions)
            words = describe(positions, whole.shape)
            if given.ndim < whole.ndim:
                positions = positions[..., 0] // whole.shape[-1]
            return given, positions, "" if words == "replica" else f"({words})"
    return None


def _listed(values: Any) -> str:
    shown = ", ".join(map(str, values[:_SHOWN].tolist()))
    return f"{shown}, ..." if values.size > _SHOWN else shown


def _shifted(first: _Applied, own: Any, wrong: Any) -> str:
    """Return text if wrong targets are those of the next or previous row, or all the same number; otherwise ""."""
    for step, words in ((1, "next"), (-1, "previous")):
        rows = first.rows[wrong] + step
        inside = (rows >= 0) & (rows < first.whole.size)
        if wrong.size > 1 and inside.sum() > wrong.size // 2:
            same = own[inside] == first.whole.reshape(-1)[rows[inside]]
            if same.mean() > 0.9:  # the rows at the ends of sequences have targets of their own
                return f": they are those of the {words} row"
    if wrong.size > 1 and np.unique(own).size == 1 and wrong.size < first.own.size:
        return f": {own[0]} is in rows {_listed(wrong)}"
    return ""

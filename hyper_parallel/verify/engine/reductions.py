"""Hypotheses about reductions: missing, over the wrong axis, done twice, mean instead of sum, scaled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.numbers import axes_of_factor, axis_sizes, ratio_of_counts
from hyper_parallel.verify.engine.pairing import PairedRuns, factor_of
from hyper_parallel.verify.engine.scalars import combinations_of_ranks
from hyper_parallel.verify.engine.store import digest_of
from hyper_parallel.verify.engine.wording import plural, ranks_words, value_words

__all__ = ["missing_as_a_whole", "missing_reduction", "scaled", "spread", "unsummed_output"]

_ENOUGH = 8
"""Smallest number of elements of a tensor that is judged by one norm."""

_KEPT = ("weight", "buffer", "state")
"""Kinds of values that each rank carries from step to step."""


def missing_reduction(evidence: Evidence) -> Cause | None:
    """Test whether the sum, mean or weighted sum over a group is the reference's value, and no rank's own value is."""
    if len(evidence.placements) < 2 or not evidence.ranks:
        return None
    for axis, groups in evidence.runs.axes.sets():
        groups_of = {rank: group for group in groups for rank in group}
        if spread(evidence, groups) != "differ":
            continue
        if any(rank not in groups_of for rank in evidence.ranks):
            continue
        for words, cause in _combinations(evidence, axis, groups_of):
            if cause is not None:
                return Cause(cause, axis if cause == "missing-reduction" else words[1], words[0])
    return None


def missing_as_a_whole(evidence: Evidence) -> Cause | None:
    """Test whether a sum or mean of unequal replicas is ten times nearer to the reference than each replica.

    In half precision, replicas may differ by less than the tolerance of their elements, so no element by itself is
    evidence. With ``_ENOUGH`` numbers, a wrong combination is ten times nearer by chance once in 10^8.
    """
    if not evidence.actual or evidence.key[0] in _KEPT:
        return None
    rank, first = next(iter(evidence.placements.items()))
    if evidence.expected[rank].size < _ENOUGH:
        return None
    for axis, groups in evidence.runs.axes.sets():
        group = next((group for group in groups if rank in group), ())
        same = all(other in evidence.actual and first.same_place(evidence.placements[other]) for other in group)
        if not same or len(group) < 2 or len({digest_of(evidence.actual[other]) for other in group}) < 2:
            continue
        expected = evidence.expected[rank].astype(np.float64)
        parts = [evidence.actual[other].astype(np.float64) for other in group]
        size = float(np.linalg.norm(expected)) or 1.0
        alone = min(float(np.linalg.norm(part - expected)) for part in parts) / size
        for words, divisor in (("sum", 1), ("mean", len(group))):
            rest = float(np.linalg.norm(sum(parts) / divisor - expected)) / size
            if rest <= alone / 10:
                text = f"{words} over {axis} of the ranks' {plural(evidence.key[0])} equals the reference within"
                text = f"{text} {100 * rest:.2g} % as a whole; the nearest alone within {100 * alone:.2g} %"
                return Cause("missing-reduction", axis, text)
    return None


def unsummed_output(runs: PairedRuns, key: Key) -> Cause | None:
    """Test whether the last output before a loss is right only as a sum over ranks, but is not declared as Partial."""
    if key[0] != "loss":
        return None
    outputs = [other for other in runs.bounds.reference if other[0] == "output" and other[2] == key[2]]
    last = outputs[-1] if outputs else None
    if last is None or not runs.holders(last):
        return None
    pending: list[tuple[int, ...]] = []
    for rank in runs.holders(last):
        placement = runs.placement(last, rank)
        if placement is None or not placement.pending or runs.ranks[rank][last].region:
            return None
        pending += placement.pending
    group = pending[0]
    axis = next((name for name, groups in runs.axes.sets() if group in groups), "")
    subject = value_words("output", last[1])
    text = (
        f"{subject}, the last one before the loss, is the reference's only as a sum over {axis or ranks_words(group)}"
    )
    return Cause("missing-reduction", axis, text)


def _combinations(
    evidence: Evidence, axis: str, groups_of: dict[int, tuple[int, ...]]
) -> Iterator[tuple[tuple[str, str], str | None]]:
    """Yield the text and axis, and the kind of the cause, of each combination over ``axis`` that is the reference."""
    subject = f"the ranks' {plural(evidence.key[0])}"
    for words, factor, cause, named in _factors(evidence, axis):
        worst, fits = 0.0, True
        for rank in evidence.ranks:
            total, size, count = evidence.combined(groups_of[rank])
            where = evidence.placements[rank].all_positions()
            if (count[where][evidence.wrong[rank]] < 2).any():
                fits = False
                break
            divisor = count[where] if factor is None else factor
            ok, error = evidence.off(rank, total[where] / divisor, size[where] / divisor)
            fits, worst = fits and ok, max(worst, error)
        if fits:
            text = f"{words} over {axis} of {subject} equals the reference within {worst:.0e}; {_alone(evidence)}"
            yield (text + _part(evidence), named), cause
    yield _weighted(evidence, axis, groups_of)


def _factors(evidence: Evidence, axis: str) -> Iterator[tuple[str, float | None, str, str]]:
    """Yield the sum, the mean, and sums divided by the size of a different axis over which values are equal."""
    yield "sum", 1.0, "missing-reduction", axis
    yield "mean", None, "missing-reduction", axis
    for other, groups in evidence.runs.axes.groups.items():
        size = max(map(len, groups))
        if other != axis and 1 < size < evidence.runs.parallel.world_size and spread(evidence, groups) == "equal":
            yield (
                f"1/{size} of the values, which are equal over {other} ({size}), summed",
                float(size),
                "wrong-axis",
                other,
            )


def spread(evidence: Evidence, groups: Sequence[tuple[int, ...]]) -> str:
    """Return whether elements that several ranks of a group have are ``equal`` or ``differ``; ``single`` if none."""
    shared = False
    for group in groups:
        members = [rank for rank in group if rank in evidence.actual]
        if len(members) < 2:
            continue
        total, size, count = evidence.combined(members)
        for rank in members:
            where = evidence.placements[rank].all_positions()
            several = count[where] > 1
            off = np.abs(evidence.actual[rank] - total[where] / count[where])
            shared = shared or bool(several.any())
            if (off > 2 * evidence.slack(rank, size[where]))[several].any():
                return "differ"
    return "equal" if shared else "single"


def _weighted(
    evidence: Evidence, axis: str, groups_of: dict[int, tuple[int, ...]]
) -> tuple[tuple[str, str], str | None]:
    """Test whether the reference is a weighted sum of the replicas, by least squares over many elements."""
    group = groups_of[evidence.ranks[0]]
    first = evidence.placements[evidence.ranks[0]]
    same = all(rank in evidence.placements and first.same_place(evidence.placements[rank]) for rank in group)
    expected = evidence.expected[evidence.ranks[0]].reshape(-1)
    if not same or expected.size < 2 * len(group) or expected.dtype.kind != "f":
        return ("", ""), None
    table = np.stack([evidence.actual[rank].reshape(-1) for rank in group], axis=1).astype(np.float64)
    weights, _, rank_of_table, _ = np.linalg.lstsq(table, expected.astype(np.float64), rcond=1e-9)
    if rank_of_table < len(group):
        return ("", ""), None
    if (
        evidence.key[0] in _KEPT
        and np.isclose(weights, np.round(weights), atol=1e-3).all()
        and np.abs(weights).max() < 1.5
    ):
        return ("", ""), None  # the reference's value is that of one rank, not a sum
    error = np.abs(table @ weights - expected)
    slack = evidence.slack(
        evidence.ranks[0], (np.abs(table) * np.abs(weights)).sum(axis=1).reshape(evidence.actual[group[0]].shape)
    )
    if not (error <= slack.reshape(-1)).all():
        return ("", ""), None
    shown = ", ".join(f"{weight:.6g}" for weight in weights)
    scale = float(np.abs(expected).max()) or 1.0
    text = (
        f"the ranks' {plural(evidence.key[0])} over {axis}, weighted with {shown}, add up to the reference within "
        f"{float(error.max()) / scale:.0e}; {_alone(evidence)}"
    )
    return (text, axis), "missing-reduction"


def scaled(evidence: Evidence) -> Cause | None:
    """Test whether the wrong elements are the reference's times a product of sizes or a ratio of counts."""
    factors: list[float] = []
    for rank in evidence.ranks:
        wrong = evidence.wrong[rank]
        factor = factor_of(
            evidence.actual[rank][wrong],
            evidence.expected[rank][wrong],
            evidence.slack(rank, evidence.actual[rank])[wrong],
        )
        if factor is None:
            return None
        factors.append(factor)
    if not factors or all(abs(factor) < 1e-9 for factor in factors):
        return None
    sizes = evidence.runs.axes.sizes()
    tolerance = max(1e-9, 4 * float(max(np.median(evidence.allowed[r]) for r in evidence.ranks)) / _scale(evidence))
    same = max(factors) - min(factors) <= tolerance * abs(factors[0])
    axes = axes_of_factor(factors[0], sizes, tolerance) if same else ()
    shown = ", ".join(f"{factor:.9g}" for factor in dict.fromkeys(round(factor, 9) for factor in factors))
    text = f"the ranks' {plural(evidence.key[0])} are the reference's times {shown}"
    if evidence.share[0] < evidence.share[1] and not _small_rest(evidence):
        by = f", the size of {axis_sizes(axes, sizes)}" if axes else ""
        return Cause("components", " x ".join(axes), f"{text}{by}{_part(evidence)}; the other elements are equal")
    if axes:
        kind = _kind_of_scale(evidence, factors[0], axes)
        inverse = "" if factors[0] > 1 else "1 / "
        return Cause(kind, " x ".join(axes), f"{text}, {inverse}the size of {axis_sizes(axes, sizes)}{_part(evidence)}")
    ratios = [ratio_of_counts(factor, tolerance) for factor in factors]
    counted = evidence.key[0] != "rate"  # a program sets the learning rate: no count of samples or tokens scales it
    if counted and all(ratio is not None for ratio in ratios):
        counts = ", ".join(str(ratio) for ratio in dict.fromkeys(ratios))
        return Cause("scaled-by-count", "", f"{text}, the ratio {counts}")
    words = "which is not a size of a group and no ratio of counts" if same else "a different factor on each rank"
    several = all(evidence.wrong[rank].sum() > 1 for rank in evidence.ranks)  # one number is a multiple of any other
    return Cause("scaled", "", f"{text}, {words}") if several else None


def _kind_of_scale(evidence: Evidence, factor: float, axes: tuple[str, ...]) -> str:
    """Return the kind of cause for a wrong factor, which depends on how the losses combine to the reference's."""
    if evidence.key[0] not in {"gradient", "state"} or len(set(axes)) != len(axes):
        return "scaled-by-size"
    loss, over = _loss_combination(evidence)
    if loss == "sum":
        return "average-for-sum" if factor < 1 else "repeated-reduction"
    if loss == "mean":
        size = int(np.prod([evidence.runs.axes.sizes()[axis] for axis in axes]))
        if factor > 1 and size == over:
            return "sum-for-average"
        return "scaled-by-size"
    return "average-for-sum" if factor < 1 else "repeated-reduction"


def _loss_combination(evidence: Evidence) -> tuple[str, int]:
    """Return how the losses of the step combine to the reference's (``replica`` if equal), and over how many ranks."""
    step = evidence.key[2]
    key = next((key for key in evidence.runs.bounds.reference if key[0] == "loss" and key[2] == step), None)
    if key is None or not evidence.runs.holders(key):
        return "", 0
    expected, allowed = float(evidence.runs.bounds.reference[key].value), float(evidence.runs.bounds.allowed(key))
    values = [float(evidence.runs.value(key, rank)) for rank in evidence.runs.holders(key)]
    if all(abs(value - expected) <= allowed for value in values):
        return "replica", 1
    for words, combined in combinations_of_ranks(evidence.runs, key):
        if all(abs(float(value) - expected) <= allowed for value in combined.values()):
            axis = words.partition(" over ")[2]
            groups = next((groups for name, groups in evidence.runs.axes.sets() if axis.startswith(name)), ((0,),))
            return words.partition(" ")[0], len(groups[0])
    return "", 0


def _small_rest(evidence: Evidence) -> bool:
    """Return whether all elements that do not differ are below four times their tolerance, such as zeros."""
    for rank in evidence.ranks:
        rest = ~evidence.wrong[rank]
        if (np.abs(evidence.expected[rank])[rest] > 4 * evidence.allowed[rank][rest]).any():
            return False
    return True


def _scale(evidence: Evidence) -> float:
    return max(float(np.abs(evidence.expected[rank]).max()) for rank in evidence.ranks) or 1.0


def _alone(evidence: Evidence) -> str:
    return f"each alone does not (error {evidence.error():.1e})"


def _part(evidence: Evidence) -> str:
    wrong, total = evidence.share
    return f" (in {wrong} of {total} elements)" if wrong < total else ""

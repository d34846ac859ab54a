"""Finds the class of an error by testing hypotheses on the numbers, the strongest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.applied import other_mask, other_targets_applied, weighted_by_targets
from hyper_parallel.verify.engine.backward import wrong_way_back
from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.losses import explain_loss
from hyper_parallel.verify.engine.matching import find_part
from hyper_parallel.verify.engine.norms import explain_clipping, explain_norm
from hyper_parallel.verify.engine.optimizer_steps import another_step, part_not_updated, scaled_update
from hyper_parallel.verify.engine.own_tokens import own_tokens
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.part_statistics import (
    at_boundaries,
    kept_value,
    local_statistics,
    other_inputs,
    other_targets,
    unequal_rows,
    weighted_by_rows,
)
from hyper_parallel.verify.engine.placement import describe
from hyper_parallel.verify.engine.randomness import explain_dropped, explain_masks
from hyper_parallel.verify.engine.reductions import (
    missing_as_a_whole,
    missing_reduction,
    scaled,
    spread,
    unsummed_output,
)
from hyper_parallel.verify.engine.samples import foreign_samples, lost_samples
from hyper_parallel.verify.engine.store import digest_of
from hyper_parallel.verify.engine.surplus import skipped_step, untied
from hyper_parallel.verify.engine.unequal_outputs import explain_unequal_outputs
from hyper_parallel.verify.engine.verdict import Difference
from hyper_parallel.verify.engine.wording import ranks_words

__all__ = ["find_cause"]

_COMPARED = 256
"""Largest number of elements of a vector that are compared with all others."""


def find_cause(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference]) -> Cause:
    """Return the class of an error with its evidence; ``unexplained`` if no hypothesis fits.

    Args:
        runs: both runs.
        key: key of the value that differs.
        wrong: every difference.
    """
    kind, ranks = key[0], wrong[key].ranks
    evidence = Evidence(runs, key, ranks) if key in runs.bounds.reference and runs.holders(key) else None
    tests: list[Any] = [_unequal_bits, _rescaled, skipped_step, _missing_value, _other_rows]
    if kind == "norm":
        tests += [_norm]
    elif kind == "mask":
        tests += [_random_mask]
    elif kind == "loss" or (kind == "output" and key in runs.bounds.reference and _is_scalar(runs, key)):
        tests += [other_targets_applied, weighted_by_targets, _loss, _unsummed_output, own_tokens, other_targets]
    elif kind == "gradient":
        tests += [_missing, untied, _clipped, weighted_by_rows, _scaled, _stale, kept_value, _misplaced, unequal_rows]
        tests += [own_tokens]
    elif kind == "rate":
        tests += [_rate_of_another_step, _scaled]
    elif kind in {"weight", "buffer"} and key[2] < 0:
        tests += [_missing_elements, _misplaced]
    elif kind in {"weight", "buffer", "state", "saved"}:
        tests += [_symptom, _not_updated, part_not_updated, _missing, weighted_by_rows, _replicas_differ, _scaled]
        tests += [_stale, _misplaced, scaled_update, another_step]
    else:
        tests += [other_mask, _missing, weighted_by_rows, _scaled, _stale, _repeated_bias, _missing_with_bias, _dropped]
        tests += [local_statistics, _misplaced, other_inputs, at_boundaries]
    for test in (*tests, _zero, _replicas_differ, _input_gradient, wrong_way_back, _components):
        cause = test(runs, key, wrong, evidence)
        if cause is not None:
            return cause  # type: ignore[no-any-return]
    return Cause("unexplained", "", _nearest(evidence))


def _rescaled(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None) -> Cause | None:
    """Test whether a tensor is off by a size of the mesh although each element is within its tolerance."""
    if evidence is None or not evidence.within_elements or not np.isfinite(wrong[key].error):
        return None
    if all(value.size < 2 for value in evidence.actual.values()):  # scalars are tested as means and sums over ranks
        return None
    factors = [factor for factor, _ in evidence.factors().values()]
    bound = runs.bounds.whole(evidence.key)
    for axis, groups in runs.axes.sets():
        for size in {len(group) for group in groups} - {1}:
            for expected in (float(size), 1.0 / size):
                if bound and factors and all(abs(factor / expected - 1) <= bound.scale for factor in factors):
                    text = f"the ranks' values are {factors[0]:.4g} times the reference's as a whole"
                    return Cause("scaled-by-size", axis, f"{text}; {axis} has {size} ranks")
    found = missing_as_a_whole(evidence) or _bias_in_complete_tensor(runs, key, evidence)
    return found or Cause("unexplained", "", _nearest(evidence))


def _bias_in_complete_tensor(runs: PairedRuns, key: Key, evidence: Evidence) -> Cause | None:
    """Test whether an output is ten times nearer to the reference without a parameter that every rank has added."""
    for name, bias in _biases(runs, key) if key[0] == "output" else ():
        for axis, groups in runs.axes.sets():
            size = max(map(len, groups))
            left = [
                (np.linalg.norm(actual - evidence.expected[rank] - (size - 1) * bias),
                 np.linalg.norm(actual - evidence.expected[rank]))
                for rank, actual in evidence.actual.items() if actual.ndim and actual.shape[-1] == bias.size
            ]  # fmt: skip
            if size > 1 and len(left) == len(evidence.actual) and all(rest <= off / 10 for rest, off in left):
                text = f"minus {size - 1} times {name} it is ten times nearer to the reference as a whole"
                return Cause("repeated-reduction", axis, f"{text}: each of the {size} ranks of {axis} adds it")
    return None


def _nearest(evidence: Evidence | None) -> str:
    """Return the facts about an unexplained difference: the factor that fits best, and the residual."""
    unknown = "no hypothesis fits the numbers"
    factors = {} if evidence is None else evidence.factors()
    if not factors:
        return unknown
    rank, (factor, rest) = max(factors.items(), key=lambda item: abs(item[1][0] - 1) + item[1][1])
    return f"{unknown}; nearest: rank {rank} has {factor:.7g} times the reference, residual {100 * rest:.2g} %"


def _rate_of_another_step(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    """Test whether a learning rate is the reference's rate of a different step."""
    for other, record in runs.bounds.reference.items():
        if (
            other[:2] == key[:2]
            and other[2] != key[2]
            and all(abs(runs.value(key, rank) - record.value) <= runs.bounds.allowed(key) for rank in wrong[key].ranks)
        ):
            return Cause("stale", "", f"the rate in step {key[2] + 1} is the single device's in step {other[2] + 1}")
    return None


def _is_scalar(runs: PairedRuns, key: Key) -> bool:
    return not np.shape(runs.bounds.reference[key].value)


def _missing_value(
    runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None
) -> Cause | None:
    """Test whether a gradient is missing or zero on some ranks, or a mask is missing in the reference."""
    if key[0] == "mask" and key not in runs.bounds.reference:
        return Cause("random-differs", "", "ranks draw a mask where the single device draws none")
    lacking = [rank for rank in wrong[key].ranks if key not in runs.ranks[rank]]
    if key[0] != "gradient":
        return None
    zero = [
        rank for rank in wrong[key].ranks
        if key in runs.ranks[rank] and not np.any(runs.value(key, rank)) and runs.value(key, rank).size
    ]  # fmt: skip
    if not lacking and not (zero and evidence is not None and len(zero) < len(evidence.actual)):
        return None
    if not lacking and evidence is not None and (missing_reduction(evidence) or all(r in zero for r in evidence.ranks)):
        return missing_reduction(evidence) or Cause("no-gradient", "", f"it is zero on {ranks_words(zero)}")
    if lacking:
        have = "has" if len(lacking) == 1 else "have"
        text = f"{ranks_words(lacking)} {have} the parameter, but the optimizer there sees no gradient of it"
        return _not_stepped(runs, key, lacking) or Cause("no-gradient", "", text)
    return None


def _not_stepped(runs: PairedRuns, key: Key, lacking: Sequence[int]) -> Cause | None:
    """Return ``not-updated`` if the parameter has a gradient on these ranks, but no step changed its weight."""
    name, step = key[1], key[2]
    for rank in lacking:
        before, after = ("weight", name, step - 1, 0), ("weight", name, step, 0)
        both = before in runs.ranks[rank] and after in runs.ranks[rank]
        subject = "parameters without a gradient"
        unknown = subject not in runs.parallel.ranks[rank].notes or name in runs.noted(rank, subject)
        if unknown or not both or not np.array_equal(runs.value(before, rank), runs.value(after, rank)):
            return None
    text = f"on {ranks_words(lacking)} no optimizer makes a step with it, and the weight is bit for bit that before"
    return Cause("not-updated", "", text)


def _zero(_runs: Any, key: Key, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    """Test whether a gradient is zero on every rank where it is wrong."""
    if key[0] != "gradient" or evidence is None or not evidence.ranks:
        return None
    if any(np.any(evidence.actual[rank][evidence.wrong[rank]]) for rank in evidence.ranks):
        return None
    part = "" if evidence.share[0] == evidence.share[1] else f", in {evidence.share[0]} of {evidence.share[1]} elements"
    return Cause("no-gradient", "", f"it is zero on {ranks_words(evidence.ranks)}{part}")


def _other_rows(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    """Test whether a value comes from wrong samples, or has right rows that the values before it do not have."""
    foreign = foreign_samples(runs, key) if key[0] == "output" and key in runs.bounds.reference else {}
    if foreign and set(foreign) == set(wrong[key].ranks):
        rows = ", ".join(f"{count} on rank {rank}" for rank, count in foreign.items())
        return Cause("data", "", f"the models get input rows that the single device does not get: {rows}")
    if key[0] == "output" and (lost := lost_samples(runs)):
        return Cause("data", "", lost)
    if key[0] not in {"output", "value", "mask"} or key not in runs.activations.other_rows():
        return None
    if any((distance := runs.distance(key, rank)) is None or distance.ratio > 1 for rank in wrong[key].ranks):
        return None
    return Cause("permuted", "", f"{wrong[key].why}; what follows differs")


def _norm(runs: PairedRuns, key: Key, _wrong: Any, _evidence: Any) -> Cause | None:
    return explain_norm(runs, key)


def _clipped(runs: PairedRuns, key: Key, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    return None if evidence is None else explain_clipping(runs, key, evidence.ranks)


def _unsummed_output(runs: PairedRuns, key: Key, _wrong: Any, _evidence: Any) -> Cause | None:
    return unsummed_output(runs, key)


def _loss(runs: PairedRuns, key: Key, _wrong: Any, _evidence: Any) -> Cause | None:
    return explain_loss(runs, key)


def _random_mask(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    return explain_masks(runs, key, {rank: runs.value(key, rank) for rank in runs.holders(key)}, wrong[key].ranks)


def _dropped(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None) -> Cause | None:
    return None if evidence is None else explain_dropped(runs, key, wrong[key].ranks, evidence)


def _missing(_runs: Any, _key: Any, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    return None if evidence is None else missing_reduction(evidence) or missing_as_a_whole(evidence)


def _scaled(_runs: Any, _key: Any, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    return None if evidence is None or not evidence.ranks else scaled(evidence)


def _missing_elements(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    """Test whether elements of an initial weight are on no rank."""
    if not runs.parameters.missing(key[1]).size:
        return None
    missing = runs.parameters.missing(key[1])
    shape = np.shape(runs.bounds.reference[key].value)
    rows = sorted({int(row) for row in np.unravel_index(missing, shape)[0]}) if shape else []
    counts = np.zeros(int(np.prod(shape)), dtype=np.int64)
    for rank in runs.holders(key):
        placement = runs.parameters.of(key[1], rank)
        if placement is not None:
            np.add.at(counts, placement.all_positions().reshape(-1), 1)
    twice = f", and {int((counts > 1).sum())} are on several" if (counts > 1).any() else ""
    del wrong
    return Cause(
        "permuted", "", f"{missing.size} elements (in rows {', '.join(map(str, rows[:8]))}) are on no rank{twice}"
    )


def _symptom(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    """Test whether a weight, buffer or state differs because its gradient or an earlier weight differs."""
    owner = runs.parameters.owner(key[1])
    for kind, name in (("gradient", owner), ("weight", owner)):
        for step in range(key[2] + 1):
            earlier = (kind, name, step - (kind == "weight"), 0)
            if earlier in wrong and earlier != key:
                cause = find_cause(runs, earlier, wrong)
                where = f"step {earlier[2] + 1}" if earlier[2] >= 0 else "training"
                return Cause(cause.kind, cause.axis, f"the {kind} of {name} differs from {where} on: {cause.evidence}")
    return None


def _not_updated(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    """Test whether a weight is bitwise equal to the weight of the step before."""
    kind, name, step, call = key
    before = (kind, name, step - 1, call)
    if kind != "weight":
        return None
    still = [
        rank for rank in wrong[key].ranks
        if before in runs.ranks[rank] and np.array_equal(runs.value(before, rank), runs.value(key, rank))
    ]  # fmt: skip
    if not still:
        return None
    notes = [rank.notes.get("parameters that no optimizer has", ()) for rank in runs.parallel.ranks]
    unknown = "; no optimizer has it" if any(name in names for names in notes) else ""
    return Cause("not-updated", "", f"the step left it unchanged, bit for bit, on {ranks_words(still)}{unknown}")


def _stale(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None) -> Cause | None:
    """Test whether a value is that of the previous step or call, or the sum of the right and the previous value."""
    if evidence is None or not evidence.ranks or evidence.ranks != list(wrong[key].ranks):
        return None
    kind, name, step, call = key
    for before, words in (((kind, name, step - 1, call), "step"), ((kind, name, step, call - 1), "call")):
        if before not in runs.bounds.reference or not _same_sizes(runs, before, key):
            continue
        fits = [_contains(runs, before, rank, evidence) for rank in evidence.ranks]
        if all("is" in fit for fit in fits):
            return Cause("stale", "", f"it is the value of the previous {words}, on {ranks_words(evidence.ranks)}")
        if all("has" in fit for fit in fits):
            return Cause(
                "stale",
                "",
                f"minus the value of the previous {words} it equals the reference: that value was not cleared",
            )
    return None


def _same_sizes(runs: PairedRuns, one: Key, other: Key) -> bool:
    """Return whether two values of the reference have the same shape; experts get different rows in each call."""
    return bool(np.shape(runs.bounds.reference[one].value) == np.shape(runs.bounds.reference[other].value))


def _contains(runs: PairedRuns, before: Key, rank: int, evidence: Evidence) -> str:
    """Return ``is`` if a rank's value is the earlier one, ``has`` if it is the sum of both values, otherwise ""."""
    placement, actual = evidence.placements[rank], evidence.actual[rank]
    old = placement.take(runs.bounds.reference[before].value)
    own = runs.value(before, rank) if before in runs.ranks[rank] else old
    if own.shape != actual.shape or not np.any(own):
        return ""
    slack = evidence.slack(rank, old) + placement.take(runs.bounds.allowed(before))
    if np.array_equal(actual, own) or (np.abs(actual - old) <= slack).all():
        return "is"
    return "has" if (np.abs(actual - own - evidence.expected[rank]) <= 2 * slack).all() else ""


def _repeated_bias(runs: PairedRuns, key: Key, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    """Test whether a parameter of an output's module or an enclosing module was added to the output several times."""
    if evidence is None or key[0] != "output" or not evidence.ranks:
        return None
    for name, bias in _biases(runs, key):
        for axis, groups in runs.axes.sets():
            size = max(map(len, groups))
            if all(_is_added(evidence, rank, bias, size - 1) for rank in evidence.ranks):
                text = (
                    f"minus {size - 1} times {name} it equals the reference: each of the {size} ranks of {axis} adds it"
                )
                return Cause("repeated-reduction", axis, text)
    return None


def _missing_with_bias(runs: PairedRuns, key: Key, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    """Test whether an output's partial sums were not reduced although each includes the complete bias."""
    if evidence is None or key[0] != "output" or not evidence.ranks:
        return None
    for name, bias in _biases(runs, key):
        for axis, groups in runs.axes.sets():
            group_of = {rank: group for group in groups for rank in group}
            if min(map(len, groups)) > 1 and all(
                rank in group_of and _sums_with_bias(evidence, rank, group_of[rank], bias) for rank in evidence.ranks
            ):
                size = max(map(len, groups))
                text = f"the sum over {axis} of the ranks' outputs, minus {size - 1} times {name}, equals the reference"
                return Cause("missing-reduction", axis, text)
    return None


def _sums_with_bias(evidence: Evidence, rank: int, group: Sequence[int], bias: Any) -> bool:
    """Return whether the values of a group add up to the expected value plus the bias, once for each rank but one."""
    actual = evidence.actual[rank]
    if not actual.ndim or actual.shape[-1] != bias.size:
        return False
    total, magnitude, count = evidence.combined(group)
    where = evidence.placements[rank].all_positions()
    extra = len(group) - 1
    return (
        bool((count[where] == len(group)).all())
        and (evidence.off(rank, total[where] - extra * bias, magnitude[where] + extra * np.abs(bias))[0])
    )


def _biases(runs: PairedRuns, key: Key) -> Iterator[tuple[str, Any]]:
    """Yield the one-dimensional parameters that the value's module, or an enclosing module, has in this step."""
    module = runs.bounds.reference[key].module
    for (kind, name, when, _), record in runs.bounds.reference.items():
        near = record.module == module or module.startswith(f"{record.module}.")
        if kind == "weight" and when == key[2] - 1 and near and np.ndim(record.value) == 1:
            yield name, np.asarray(record.value)


def _is_added(evidence: Evidence, rank: int, bias: Any, times: int) -> bool:
    actual = evidence.actual[rank]
    if not actual.ndim or actual.shape[-1] != bias.size:
        return False
    return evidence.off(rank, actual - times * bias, np.abs(actual) + times * np.abs(bias))[0]


def _misplaced(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None) -> Cause | None:
    """Test whether a value is a different shard of the reference's value, or has a different name in the reference."""
    if key not in runs.bounds.reference:
        return None
    total, allowed = np.asarray(runs.bounds.reference[key].value), runs.bounds.allowed(key)
    exact = key[2] < 0
    matches: list[str] = []
    for rank in wrong[key].ranks:
        if key not in runs.ranks[rank] or not runs.value(key, rank).size:
            continue
        value, has = runs.value(key, rank), f"rank {rank} has the single device's"
        match = find_part(value, total, None if exact else allowed)
        if match is not None and (exact or _tells_elements_apart(value, total, allowed)):
            matches.append(f"{has} {describe(match.positions, total.shape) or 'rows in another order'}")
            continue
        other = next(_same_value(runs, key, value), "")
        if not other:
            return None
        matches.append(f"{has} {other}")
    if not matches:
        return None
    del evidence
    return Cause("permuted", "", "; ".join(matches[:4]))


def _tells_elements_apart(value: Any, total: Any, allowed: Any) -> bool:
    """Return whether most elements of a vector match one element of the reference only; True for tensors with rows."""
    if total.ndim != 1 or total.dtype.kind != "f":
        return True
    own = np.asarray(value, dtype=np.float64).reshape(-1)[:_COMPARED]
    fits = np.abs(own[:, None] - total.astype(np.float64)[None]) <= allowed[None]
    return bool(np.median(fits.sum(axis=1)) <= 1)


def _same_value(runs: PairedRuns, key: Key, value: Any) -> Iterator[str]:
    """Yield other names of the same kind and step whose reference equals ``value``."""
    for other, record in runs.bounds.reference.items():
        if other[0] == key[0] and other[2] == key[2] and other[1] != key[1] and np.shape(record.value) == value.shape:
            allowed = 0.0 if key[2] < 0 else runs.bounds.allowed(other)
            if value.dtype.kind in "fc" and (np.abs(value - record.value) <= allowed).all():
                yield other[1]


def _unequal_bits(_runs: Any, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None) -> Cause | None:
    """Test whether ranks have the same shard with different bits, although each is within the tolerance."""
    if evidence is None or not evidence.within_elements or key[0] not in {"weight", "state"}:
        return None
    ranks = [rank for rank in wrong[key].ranks if rank in evidence.actual]
    differ = any(
        evidence.placements[ranks[0]].same_place(evidence.placements[rank])
        and digest_of(evidence.actual[ranks[0]]) != digest_of(evidence.actual[rank])
        for rank in ranks[1:]
    )
    return Cause("replicas-differ", "", wrong[key].why) if differ else None


def _replicas_differ(runs: PairedRuns, key: Key, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    """Test whether ranks have the same shard with different values."""
    if evidence is None or not evidence.ranks or evidence.replicated:
        return None
    right = [rank for rank in evidence.actual if rank not in evidence.ranks]
    if key[0] == "gradient" and not right:
        axis = next((axis for axis, groups in runs.axes.sets() if spread(evidence, groups) == "differ"), "")
        text = "ranks that hold the same part have different gradients, none of them the reference's"
        return Cause("missing-reduction", axis, f"{text} (error {evidence.error():.1e})")
    if key[0] == "loss" and not right:
        return None  # the value may be local to the rank
    if key[0] == "output" and not right:
        return explain_unequal_outputs(runs, key, evidence)
    known = f"; {ranks_words(right)} {'has' if len(right) == 1 else 'have'} the reference's" if right else ""
    text = f"ranks that hold the same part have different values, wrong on {ranks_words(evidence.ranks)}{known}"
    return Cause("replicas-differ", "", text)


def _input_gradient(
    runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None
) -> Cause | None:
    """Test whether the gradient of a sharded module's input was not reduced, so that gradients before it are wrong."""
    kind, name, step, _ = key
    if kind != "gradient" or evidence is None or not evidence.ranks:
        return None
    if any(other[2] < step or (other[2] == step and other[0] in {"output", "loss"}) for other in wrong):
        return None
    places = list(runs.bounds.reference)
    later = [other for other in places[places.index(key) + 1 :] if other[0] == "gradient" and other[2] == step]
    for other in later:
        axis = "" if other in wrong else _sharded_over(runs, other[1], name)
        if axis:
            text = f"the gradients of {other[1]}, which is sharded over {axis}, are right, those before it are wrong"
            near = f"nearest: the gradient of its input (not recorded) is not summed over {axis}"
            return Cause("missing-reduction", axis, f"{text}; {near}")
    return None


def _sharded_over(runs: PairedRuns, name: str, plain: str) -> str:
    """Return an axis over which parameter ``name`` is sharded and ``plain`` is not; empty if there is none."""
    for axis, groups in runs.axes.groups.items():
        same = []
        for group in groups:
            for parameter in (name, plain):
                places = [runs.parameters.of(parameter, rank) for rank in group]
                known = [place for place in places if place is not None]
                same.append(len(known) == len(group) and all(known[0].same_place(place) for place in known))
        if len(runs.axes.groups[axis][0]) > 1 and not any(same[::2]) and all(same[1::2]):
            return axis
    return ""


def _components(_runs: Any, key: Key, _wrong: Any, evidence: Evidence | None) -> Cause | None:
    """Test whether some components of the value are wrong and no factor corrects them."""
    if evidence is None or not evidence.ranks:
        return None
    wrong, total = evidence.share
    rank = evidence.ranks[0]
    if evidence.actual[rank].size < 2:
        return None  # a single number is always a multiple of another
    actual, expected = evidence.actual[rank].reshape(-1), evidence.expected[rank].reshape(-1)
    lengths = float(np.linalg.norm(actual)) * float(np.linalg.norm(expected))
    cosine = abs(float(np.vdot(actual, expected))) / lengths if lengths else 0.0
    if wrong == total and key[0] not in {"gradient", "output", "value"}:
        return None
    if wrong == total and cosine < 0.05:
        return None
    return Cause(
        "components",
        "",
        f"{wrong} of {total} elements differ, by no common factor; cosine with the reference {cosine:.6f}",
    )

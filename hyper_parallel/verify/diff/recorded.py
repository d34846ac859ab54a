"""Compares two recordings by their fingerprints: which values are equal, and which differences rounding explains.

**Tolerances.** Recordings are not rerun, so tolerances are not measured: they are derived from the differences of
earlier values. As long as all earlier values are bitwise equal, the tolerance of a value is the multiple of its unit in
the last place that the engine uses for a complete tensor (:mod:`hyper_parallel.verify.engine.noise`). After the first
value that differs, the tolerance is the same multiple of the largest earlier relative distance among values that
rounding explains. One module or one step does not amplify rounding by more than that. Once gradients differ, the
tolerance of an updated weight also includes a quarter of the update: AdamW divides by the gradient's magnitude, so the
sign of a gradient that is only rounding noise decides the direction of a complete step.

Once the tolerance reaches half of a value, later values are not judged, and the report names the first of them.
Operators in a log of DebugMode are not judged after the first update once bits differ, or if the log has no norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.verify.diff.alignment import align_calls
from hyper_parallel.verify.diff.start import require_common_names
from hyper_parallel.verify.diff.together import alike_on_all_ranks, with_declared
from hyper_parallel.verify.engine.bounds import Key, index_records
from hyper_parallel.verify.engine.declared import names_value
from hyper_parallel.verify.engine.distance import distance
from hyper_parallel.verify.engine.noise import HALF_MULTIPLE, MULTIPLE, NOISE_SHARE
from hyper_parallel.verify.engine.pairing import last_gradients_aligned
from hyper_parallel.verify.engine.store import largest
from hyper_parallel.verify.engine.wording import value_words
from hyper_parallel.verify.frameworks.contract.fingerprint import CHOSEN, LARGEST, LEAST, NORM, Fingerprint
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.stored import Recording

__all__ = ["Judged", "Pair", "judge", "of_steps", "pair_recordings", "pairs_of_rank", "steps_words", "words_of"]

_PHASES = {"gradient": 1, "norm": 1, "rate": 1, "weight": 2, "buffer": 2}
"""Phases of a step, in order: 0 for the forward, 1 for the backward, 2 for the update. Values depend only on values of
the same and earlier phases.
"""

_UPDATE_SHARE = 0.25
_UNJUDGED = 0.5
_UNITS = {
    "float64": 2.0**-52, "complex128": 2.0**-52, "float32": 2.0**-23, "complex64": 2.0**-23, "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}  # fmt: skip
_HALF = ("float16", "bfloat16")
_WHOLE_SHARE = 4.0  # the divisor by which the engine reduces the multiple for a complete tensor


@dataclass(frozen=True)
class Pair:
    """One value of both recordings.

    Attributes:
        record: A's record, with names, step and call.
        one: A's fingerprint.
        other: B's fingerprint.
        rank: the rank on which the value was recorded; -1 for a value that all ranks of a recording share.
    """

    record: Record
    one: Fingerprint
    other: Fingerprint
    rank: int


@dataclass(frozen=True)
class Judged:
    """A pair and its comparison.

    Attributes:
        pair: the values.
        off: distance of the values relative to their size; infinity if it cannot be measured.
        allowed: tolerance for rounding.
        noticed: smallest relative error of the complete value that would have been detected.
        limit: a value whose tolerance is at least this large is not judged.
        why: description of the differences between elements, with numbers, if all were compared; else empty.
    """

    pair: Pair
    off: float
    allowed: float
    noticed: float = 0.0
    limit: float = _UNJUDGED
    why: str = ""

    @property
    def differs(self) -> bool:
        """Whether the difference exceeds the tolerance for rounding."""
        return self.off > self.allowed and not self.unjudged

    @property
    def unjudged(self) -> bool:
        """Whether the tolerance is too large for a judgement."""
        return self.allowed >= self.limit and np.isfinite(self.off) and self.off > 0


def pair_recordings(
    first: Recording,
    second: Recording,
    declared: Mapping[str, str] | None = None,
    meshes: tuple[Mapping[str, int] | None, Mapping[str, int] | None] = (None, None),
) -> tuple[list[list[Pair]], list[str], list[str], list[str]]:
    """Return the values that both recordings have.

    Args:
        first: A.
        second: B. With the same number of ranks, each rank is compared with the same rank of A. With a different
            number, or with declared placements, two kinds of values are compared: those that are equal on all ranks of
            a recording, and those whose shards make up the complete value.
        declared: placements by pattern of names.
        meshes: sizes of the axes of A's ranks and of B's, by name.

    Returns:
        The pairs in A's order, by rank (one list if the numbers of ranks differ); the values that are not compared;
        notes; values that contradict their declarations.

    Raises:
        InputError: the recordings share no name or no step, or a declaration does not match.
    """
    left_out: list[str] = []
    contradicted: list[str] = []
    one, other = first.run, second.run
    if first.is_log != second.is_log:
        label, log = ("A", first) if first.is_log else ("B", second)
        raise InputError(no_operators(label, log))
    if first.is_dump != second.is_dump:
        one, other, left_out = _without_backward(one), _without_backward(other), [BACKWARD_OF_DUMPS]
    require_common_names(*([record.key for rank in run.ranks for record in rank.records] for run in (one, other)))
    steps = first.steps & second.steps
    if not steps:
        msg = (
            f"A and B share no step, so nothing can be compared: A has {steps_words(first.steps)}, B has "
            f"{steps_words(second.steps)}"
        )
        raise InputError(msg)
    if one.world_size == other.world_size and not declared:
        sides = list(zip(one.ranks, other.ranks, strict=True))
        numbers = list(range(one.world_size))
    else:
        both = []
        for run, label in zip(with_declared((one, other), declared or {}, meshes), "AB", strict=True):
            records, own = alike_on_all_ranks(run)
            words, wrong = _not_together(run, own, declared or {}, label)
            left_out += words
            contradicted += wrong
            both.append(RankRecords(0, records))
        sides, numbers = [(both[0], both[1])], [-1]
    pairs: list[list[Pair]] = []
    notes: list[str] = []
    for number, (left, right) in zip(numbers, sides, strict=True):
        found, missing, words = pairs_of_rank(of_steps(left, steps), of_steps(right, steps), number)
        pairs.append(found)
        left_out += missing
        notes += words
    if not any(pairs):
        msg = (
            f"A and B share no value that can be compared: {'; '.join(dict.fromkeys(left_out))}. Record both with the "
            "same sharding, or compare each with its program (verify diff FOLDER train.py)"
        )
        raise InputError(msg)
    notes += [
        f"steps that only {label} has: {steps_words(own - steps)}"
        for label, own in (("A", first.steps), ("B", second.steps))
        if own - steps
    ]
    return pairs, list(dict.fromkeys(left_out)), list(dict.fromkeys(notes)), contradicted


BACKWARD_OF_DUMPS = (
    "gradients: those of a dump are of one backward pass, before sums over ranks and micro-batches and before clipping"
)


def _not_together(run: Run, own: Sequence[Key], declared: Mapping[str, str], label: str) -> tuple[list[str], list[str]]:
    """Return sentences about values of a run that are not compared, and those about contradicted declarations."""
    stated = {key for key in own if any(names_value(pattern, *key[:2]) for pattern in declared)}
    pending = {record.key for rank in run.ranks for record in rank.records if record.region and record.region.pending}
    wrong = words_of(
        [key for key in own if key in stated - pending],
        f"declared parts make no value on the ranks of {label}: copies differ, or parts are missing",
    )
    words = words_of([key for key in own if key in stated & pending], f"on the ranks of {label} a sum is pending")
    others = [key for key in own if key not in stated]
    return [*words, *wrong, *words_of(others, f"on the ranks of {label} each has its own, or a shard")], wrong


def _without_backward(run: Run) -> Run:
    """Return a run without gradients and inputs, which have different meanings in dumps and in other recordings."""
    ranks = [
        replace(rank, records=[each for each in rank.records if each.kind not in ("gradient", "input")])
        for rank in run.ranks
    ]
    return replace(run, ranks=ranks)


def no_operators(label: str, log: Recording) -> str:
    """Return why a log of DebugMode cannot be compared with a different kind of recording."""
    return (
        f"{label}: {log.folder} is a log of DebugMode, which has operators, and the other run's records have modules: "
        "log the other run under DebugMode, too"
    )


def of_steps(rank: RankRecords, steps: set[int]) -> RankRecords:
    """Return a rank's records of the given steps and those before training."""
    return replace(rank, records=[record for record in rank.records if record.step < 0 or record.step in steps])


def pairs_of_rank(
    left: RankRecords, right: RankRecords, number: int, labels: str = "AB"
) -> tuple[list[Pair], list[str], list[str]]:
    """Return the pairs of a rank, the values that are not compared, and a description of aligned calls."""
    flat = [replace(rank, records=[_numbers_only(record) for record in rank.records]) for rank in (left, right)]
    aligned, words = align_calls(Run([flat[0]]), Run([flat[1]]))
    again = [
        replace(record, call=other.call) for record, other in zip(right.records, aligned.ranks[0].records, strict=True)
    ]
    known = index_records(left.records)
    own = last_gradients_aligned(index_records(again), known)
    pairs: list[Pair] = []
    sharded: list[Key] = []
    other_numbers: list[Key] = []
    for key, record in known.items():
        if key not in own:
            continue
        if not record.value.comparable(own[key].value):
            other_numbers.append(key)
        elif key[0] == "input":  # a different shape is a different batch
            pairs.append(Pair(record, record.value, own[key].value, number))
        elif record.value.shape != own[key].value.shape or record.region != own[key].region:
            sharded.append(key)
        elif record.region is None or not record.region.pending:
            pairs.append(Pair(record, record.value, own[key].value, number))
    missing = [key for key in known if key not in own], [key for key in own if key not in known]
    left_out = words_of(sharded, "A and B have other shards, or other shapes of it")
    left_out += words_of(other_numbers, "A and B have other numbers of it")
    left_out += [
        each for keys, label in zip(missing, labels, strict=True) for each in words_of(keys, f"only {label} has it")
    ]
    return pairs, left_out, words


def _numbers_only(record: Record) -> Record:
    value = record.value
    numbers = value.numbers if value.known is None else np.where(np.isnan(value.numbers), 0.0, value.numbers)
    return replace(record, value=numbers)


def words_of(keys: Iterable[Key], why: str) -> list[str]:
    """Return one line about the values that are not compared."""
    names = list(dict.fromkeys(value_words(key[0], key[1]) for key in keys))
    if not names:
        return []
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return [f"{', '.join(names[:4])}{more}: {why}"]


def steps_words(steps: set[int]) -> str:
    """Return numbers of steps in words: ``steps 1-3``."""
    ordered = sorted(step + 1 for step in steps)
    if not ordered:
        return "no step"
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"step {ordered[0]}" if len(ordered) == 1 else f"steps {ordered[0]}-{ordered[-1]}"
    return f"steps {', '.join(map(str, ordered[:6]))}{' and more' if len(ordered) > 6 else ''}"


def judge(pairs: Sequence[Sequence[Pair]]) -> list[Judged]:
    """Return the judged pairs, in the order of steps and of execution in each step.

    Args:
        pairs: pairs by rank, in the order of execution.
    """
    every = [pair for own in pairs for pair in own]
    unit, multiple = _rounding(every)
    sizes = _sizes(every)
    grown = 0.0
    found: list[Judged] = []
    earlier: dict[tuple[int, str, str], Fingerprint] = {}
    for step in sorted({pair.record.step for pair in every}):
        explained: list[tuple[int, float]] = []
        judged: list[tuple[int, Judged]] = []
        updates = _updates([pair for pair in every if pair.record.step == step and _phase(pair) == 2], earlier)
        for own in pairs:
            largest = grown
            for place, pair in enumerate(pair for pair in own if pair.record.step == step):
                off = _off(pair, sizes)
                allowed = _allowed(pair, largest, unit, multiple, updates)
                result = Judged(pair, off, allowed, allowed)
                judged.append((place, result))
                if not result.differs:
                    largest = max(largest, min(off, allowed))
                    explained.append((_phase(pair), min(off, allowed)))
        for number, (place, result) in enumerate(judged):  # earlier values of other ranks may explain a difference
            if result.differs:
                before = [off for phase, off in explained if phase <= _phase(result.pair)]
                allowed = _allowed(result.pair, max(before, default=grown), unit, multiple, updates)
                judged[number] = (place, replace(result, allowed=max(allowed, result.allowed)))
        grown = max([grown, *(off for _, off in explained)])
        found += [_with_elements(result) for _, result in sorted(judged, key=lambda each: each[0])]
        earlier.update({_weight_key(result.pair): result.pair.one for _, result in judged if _phase(result.pair) == 2})
    return found


def _with_elements(result: Judged) -> Judged:
    """Return the comparison with a description of differing elements, if the value differs and has all elements."""
    one, other = result.pair.one, result.pair.other
    if not result.differs or not one.both_whole(other):
        return result
    allowed = np.full(one.shape, result.allowed * largest(one.whole))
    return replace(result, why=distance(other.whole, one.whole, allowed).why)


def _phase(pair: Pair) -> int:
    return _PHASES.get(pair.record.kind, 0)


def _weight_key(pair: Pair) -> tuple[int, str, str]:
    return pair.rank, pair.record.kind, pair.record.name


def _rounding(pairs: Iterable[Pair]) -> tuple[float, float]:
    """Return the ULP and the multiple for the coarsest dtype; statistics count as float32 at best."""
    dtypes = {
        "float32" if each.known is not None and each.dtype in ("float64", "complex128") else each.dtype
        for pair in pairs
        for each in (pair.one, pair.other)
    } - {""}
    numbers = [dtype for dtype in dtypes if dtype in _UNITS] or ["float32"]
    coarsest = max(numbers, key=_UNITS.__getitem__)
    return _UNITS[coarsest], HALF_MULTIPLE if coarsest in _HALF else MULTIPLE


def _allowed(
    pair: Pair, largest: float, unit: float, multiple: float, updates: Mapping[tuple[int, str, str], float]
) -> float:
    if pair.record.kind == "call" and not _can_be_judged(pair, largest):
        return np.inf
    if pair.one.is_exact:
        return 0.0
    allowed = max(multiple / _WHOLE_SHARE * unit, multiple * largest) + max(pair.one.rounding, pair.other.rounding)
    return allowed + (_UPDATE_SHARE * updates.get(_weight_key(pair), 0.0) if largest else 0.0)


def _can_be_judged(pair: Pair, largest: float) -> bool:
    """Return whether an operator's numbers show more than whether bits differ: with norms, before updates differ."""
    return pair.one.both_have(NORM, pair.other) and (pair.record.step == 0 or not largest)


def _updates(
    pairs: Sequence[Pair], earlier: Mapping[tuple[int, str, str], Fingerprint]
) -> dict[tuple[int, str, str], float]:
    """Return, for each weight of a step, the norm of its update relative to the norm of the weight.

    Statistics alone underestimate an update that keeps a norm: for such weights, the largest update of the step is
    used.
    """
    updates: dict[tuple[int, str, str], float] = {}
    tiny = float(np.finfo(np.float64).tiny)
    for pair in pairs:
        before = earlier.get(_weight_key(pair))
        if before is not None and before.shape == pair.one.shape:
            update = before.distance(pair.one)
            updates[_weight_key(pair)] = update / max(pair.one.norm, update, tiny)
    largest = max(updates.values(), default=0.0)
    statistics = {_weight_key(pair) for pair in pairs if pair.one.known is not None}
    return {key: largest if key in statistics else update for key, update in updates.items()}


def _sizes(pairs: Iterable[Pair]) -> dict[tuple[str, int], float]:
    """Return the largest root mean square of each kind in each step; single numbers of all steps are combined."""
    sizes: dict[tuple[str, int], float] = {}
    for pair in pairs:
        one = pair.one
        size = one.norm / np.sqrt(max(one.size, 1)) if one.both_have(NORM, one) else one.extreme
        if one.size and np.isfinite(size):
            key = _size_key(pair)
            sizes[key] = max(sizes.get(key, 0.0), size)
    return sizes


def _size_key(pair: Pair) -> tuple[str, int]:
    if pair.record.kind == "call":  # sizes are similar among calls of an operator only
        return pair.record.name.partition(" in ")[0], pair.record.step
    return pair.record.kind, 0 if pair.one.size == 1 and pair.record.kind != "gradient" else pair.record.step


def _off(pair: Pair, sizes: Mapping[tuple[str, int], float]) -> float:
    """Return the distance of two values relative to their size, or to a fraction of their kind's if that is larger."""
    one, other = pair.one, pair.other
    if one.same(other):
        return 0.0
    if one.shape != other.shape or one.is_exact or other.is_exact or not one.finite_alike(other):
        return np.inf
    norm, extreme, has_norm, has_ends = one.norm, one.extreme, one.both_have(NORM, other), one.both_have(LARGEST, other)
    if one.both_whole(other):
        finite = np.isfinite(one.whole)
        with np.errstate(invalid="ignore"):
            off, own = (
                np.where(finite, each, 0).astype(np.complex128) for each in (one.whole - other.whole, one.whole)
            )
        if not np.array_equal(one.whole[~finite], other.whole[~finite], equal_nan=True) or not np.isfinite(off).all():
            return np.inf
        apart, most, norm, extreme = float(np.linalg.norm(off)), largest(off), float(np.linalg.norm(own)), largest(own)
        has_norm = has_ends = True
    elif one.some_not_finite:
        return 0.0  # equally many elements are not finite; no more is known
    else:
        ends = np.abs(one.numbers - other.numbers)[[LEAST, LARGEST, *range(CHOSEN.start, CHOSEN.stop)]]
        apart, most = one.distance(other), float(np.nanmax(ends) if has_ends else 0.0)
    floor = NOISE_SHARE * sizes.get(_size_key(pair), 0.0)
    norm, extreme = max(norm, floor * float(np.sqrt(max(one.size, 1)))), max(extreme, floor)
    if not has_norm and not has_ends:
        return float(np.finfo(np.float64).tiny)  # bits differ, but the distance is unknown
    parts: list[Any] = []
    if has_norm:
        parts.append(apart / norm if norm else np.inf)
    if has_ends and (_phase(pair) < 2 or not has_norm):  # an element of a weight may be off by a full update
        parts.append(most / extreme if extreme else np.inf)
    return float(np.nan_to_num(max(parts), nan=np.inf))

"""Hypotheses about a gradient norm that was computed from one rank's shard, or counts parameters several times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement
from hyper_parallel.verify.engine.wording import ranks_words

__all__ = ["explain_clipping", "explain_norm"]

_TOLERANCE = 1e-4
"""Largest error of a hypothesis about a norm, relative to the difference that it explains."""

_COARSE = 0.02
"""The same for gradients in half precision, whose rounding errors are larger."""


def explain_norm(runs: PairedRuns, key: Key) -> Cause | None:
    """Return why a norm differs: it was computed from a wrong selection of the ranks' gradients."""
    gradients = _gradients(runs, key[2])
    norm = float(runs.bounds.reference[key].value)
    ranks = {rank: float(runs.value(key, rank)) for rank in runs.holders(key) if runs.value(key, rank).size == 1}
    if not gradients or not ranks or norm <= 0:
        return None
    for power, words in ((2.0, "2-norm"), (np.inf, "inf-norm"), (1.0, "1-norm")):
        whole = _norm([value.reshape(-1) for value in gradients.values()], power)
        factor = norm / whole if whole else 0.0  # gradients are recorded after clipping
        if power == 2.0 and not _clips(runs, gradients, key, factor):
            continue
        scaled = {name: value * factor for name, value in gradients.items()}
        for text, kind, expected in _hypotheses(runs, scaled, power, key):
            distinct = len({expected.get(rank) for rank in ranks}) > 1  # one number matches many hypotheses roughly
            tolerance = _COARSE if distinct and runs.bounds.movements.whole("rounded", key).norm else _TOLERANCE
            if all(_fits(value, expected.get(rank), norm, tolerance) for rank, value in ranks.items()):
                shown = ", ".join(f"{value:.9g}" for value in dict.fromkeys(ranks.values()))
                return Cause(kind, "", f"{text} is {shown} ({words}); the single device has {norm:.9g}")
    return None


def explain_clipping(runs: PairedRuns, key: Key, ranks: Sequence[int]) -> Cause | None:
    """Return why ranks have different multiples of a gradient: each rank clipped by the norm of its own shards.

    A program that clips gradients itself records no norm, but the factors reveal it. Ranks whose own norm is below the
    limit do not change their gradients. So their gradients are all the reference's times the same number.
    """
    factors = {rank: runs.factor(key, rank) for rank in ranks}
    known = {rank: factor for rank, factor in factors.items() if factor}
    gradients = _gradients(runs, key[2])
    alike = len({f"{factor:.6g}" for factor in known.values()}) == 1
    if not known or len(known) < len(factors) or (alike and len(runs.holders(key)) > 1):
        return None
    bound = runs.bounds.whole(key)
    tolerance = max(_TOLERANCE, 0.0 if bound is None else min(bound.scale, _COARSE))
    flat = {key[1]: gradients[key[1]]}  # a flat gradient of all parameters may be recorded, too
    for counted, (power, words) in product((gradients, flat), ((2.0, "2-norm"), (np.inf, "inf-norm"), (1.0, "1-norm"))):
        whole = _norm(list(counted.values()), power)
        local = {rank: _norm(list(_parts(runs, counted, rank, key[2]).values()), power) for rank in known}
        left = [rank for rank, factor in known.items() if abs(factor * local[rank] - whole) > tolerance * whole]
        below = all(known[rank] * local[rank] < whole for rank in left)
        alike = all(abs(known[rank] - known[left[0]]) <= tolerance * known[left[0]] for rank in left)
        if len(left) < len(known) and below and alike:
            shown = ", ".join(f"{factor:.9g}" for factor in known.values())
            why = f"the {words} of all gradients, divided by that of the rank's part"
            if left:
                why += f"; {ranks_words(left)}, below the limit, {'does' if len(left) == 1 else 'do'} not clip"
            text = f"the ranks' gradients are the reference's times {shown}: {why}"
            return Cause("norm-local", "", text)
    return None


def _gradients(runs: PairedRuns, step: int) -> dict[str, Any]:
    """Return the reference's gradients of a step by name."""
    return {
        name: np.asarray(record.value)
        for (kind, name, when, _), record in runs.bounds.reference.items()
        if kind == "gradient" and when == step
    }


def _clips(runs: PairedRuns, gradients: Mapping[str, Any], key: Key, factor: float) -> bool:
    """Return whether the recorded gradients can have the norm: their 2-norm equals it, or is less after clipping."""
    del runs, key
    return bool(gradients) and factor >= 1 - 1e-5


def _fits(value: float, expected: float | None, norm: float, tolerance: float) -> bool:
    return expected is not None and abs(value - expected) <= max(tolerance * abs(value - norm), 1e-12 * norm)


def _norm(parts: list[Any], power: float) -> float:
    flat = np.concatenate([np.abs(part.reshape(-1)).astype(np.float64) for part in parts]) if parts else np.zeros(0)
    if not flat.size:
        return 0.0
    return float(flat.max()) if power == np.inf else float((flat**power).sum() ** (1 / power))


def _hypotheses(
    runs: PairedRuns, gradients: Mapping[str, Any], power: float, key: Key
) -> Iterator[tuple[str, str, dict[int, float]]]:
    """Yield, for each hypothesis, its text, its cause and the norm that each rank would have."""
    world = range(runs.parallel.world_size)
    local = {rank: _norm(list(_parts(runs, gradients, rank, key[2]).values()), power) for rank in world}
    yield "the norm of each rank's own part", "norm-local", local
    for rank in world:
        yield f"the norm of rank {rank}'s part", "norm-local", dict.fromkeys(world, local[rank])
    for axis, groups in runs.axes.sets():
        members = {rank: group for group in groups for rank in group}
        summed = {rank: sum(local[other] for other in members.get(rank, (rank,))) for rank in world}
        largest = {rank: max(local[other] for other in members.get(rank, (rank,))) for rank in world}
        yield f"the sum over {axis} of the ranks' norms", "norm-counted-twice", summed
        united = {group: _norm(_united(runs, gradients, group, key[2]), power) for group in groups}
        alone = {rank: united.get(members.get(rank, ()), local[rank]) for rank in world}
        yield f"the norm over {axis} alone", "norm-local", alone
        if power != np.inf:
            squares = {rank: sum(local[other] ** power for other in members.get(rank, (rank,))) for rank in world}
            roots = {rank: value ** (1 / power) for rank, value in squares.items()}
            yield f"the norm over {axis} of every rank's part, replicas included,", "norm-counted-twice", roots
            means = {rank: (value / len(members.get(rank, (rank,)))) ** (1 / power) for rank, value in squares.items()}
            yield f"the norm of the mean over {axis} of the ranks' squares", "norm-local", means
        yield f"the largest over {axis} of the ranks' norms", "norm-local", largest
    if power != np.inf:
        yield from _classes(runs, gradients, power, float(runs.bounds.reference[key].value))


def _classes(
    runs: PairedRuns, gradients: Mapping[str, Any], power: float, norm: float
) -> Iterator[tuple[str, str, dict[int, float]]]:
    """Yield norms that count expert, replicated and sharded parameters a wrong number of times, equal on all ranks."""
    world = range(runs.parallel.world_size)
    sizes = {1, *runs.axes.sizes().values(), runs.parallel.world_size}
    sums: dict[tuple[str, ...], float] = {}
    names: dict[tuple[str, ...], str] = {}
    for name, value in gradients.items():
        holders = [rank for rank in world if runs.parameters.of(name, rank) is not None]
        kind = "experts" if "expert" in name else "replicated" if _replicated(runs, name, holders) else "sharded"
        sums[kind,] = sums.get((kind,), 0.0) + float((np.abs(value).astype(np.float64) ** power).sum())
        names.setdefault((kind,), kind)
    if not sums or len(sums) > 3:
        return
    multiples = sorted({*(float(size) for size in sizes), *(1.0 / size for size in sizes), 0.0})
    for times in product(multiples, repeat=len(sums)):
        if all(count == 1.0 for count in times):
            continue
        total = sum(count * part for count, part in zip(times, sums.values(), strict=True)) ** (1 / power)
        words = ", ".join(f"{names[kind]} parameters {count:g} times" for kind, count in zip(sums, times, strict=True))
        cause = "norm-counted-twice" if total > norm else "norm-local"
        yield f"the norm that counts {words}", cause, dict.fromkeys(world, total)


def _replicated(runs: PairedRuns, name: str, holders: list[int]) -> bool:
    placements = [runs.parameters.of(name, rank) for rank in holders]
    return len(holders) > 1 and all(placement is not None and placement.positions is None for placement in placements)


def _parts(runs: PairedRuns, gradients: Mapping[str, Any], rank: int, step: int) -> dict[str, Any]:
    """Return the shards of the reference's gradients that a rank's optimizer receives."""
    placements = {name: _placement(runs, ("gradient", name, step), rank) for name in gradients}
    return {name: placement.take(gradients[name]) for name, placement in placements.items() if placement is not None}


def _united(runs: PairedRuns, gradients: Mapping[str, Any], group: Sequence[int], step: int) -> list[Any]:
    """Return the elements of the reference's gradients that some rank of a group has, each element once."""
    parts = []
    for name, gradient in gradients.items():
        covered = np.zeros(gradient.size, bool)
        for rank in group:
            placement = _placement(runs, ("gradient", name, step), rank)
            if placement is not None:
                placement.mark(covered)
        parts.append(gradient.reshape(-1)[covered])
    return parts


def _placement(runs: PairedRuns, gradient: tuple[str, str, int], rank: int) -> Placement | None:
    """Return the placement of a rank's last gradient of a parameter in a step, or of the parameter if there is none."""
    calls = [call for call in runs.calls(gradient) if call in runs.ranks[rank]]
    placement = runs.placement(calls[-1], rank) if calls else None
    return runs.parameters.of(gradient[1], rank) if placement is None else placement

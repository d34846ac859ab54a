"""Repairs of a case: changes that remove its blind spots, after a comparison without differences.

A change is made only where every rank's shard of the value is known: initial weights and outputs by their placements,
inputs by their position in the memory of one batch. Other changes are left to the user, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.noise import seed_of
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement, renamed
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.records import Record, Run

__all__ = ["STEPS", "Repairs", "not_made", "random_cotangent", "repairs_of", "shares", "spread_constant"]

SPREAD = 0.1
"""Standard deviation of the noise added to constant parameters, relative to their value or to 1."""

STEPS = 3
"""Number of optimizer steps of a repaired case that had one: the first additional step reveals stale values, the second
drifting replicas.
"""


@dataclass
class Repairs:
    """The changes of the reference and of each rank.

    Attributes:
        reference: changes of the run on one rank.
        ranks: changes by rank.
        words: for each kind of blind spot, the change in a sentence.
        left: for each kind of blind spot, what cannot be changed and why.
        shared: axes whose ranks' losses are weighted.
    """

    reference: CaseChanges
    ranks: list[CaseChanges]
    words: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()


def repairs_of(runs: PairedRuns, spots: Sequence[BlindSpot], seed: int, without: Sequence[str] = ()) -> Repairs:
    """Return the changes for the blind spots of a comparison without differences.

    Args:
        runs: the compared runs.
        spots: blind spots of the case.
        seed: seed of the random values.
        without: kinds of blind spots that are not repaired.
    """
    repairs = Repairs(CaseChanges(), [CaseChanges() for _ in runs.ranks])
    kinds: dict[str, list[BlindSpot]] = {"constant-parameters": []}
    for spot in spots:
        kinds.setdefault(spot.kind, []).append(spot)
    for kind, repair in _REPAIRS.items():
        if kind in kinds and kind not in without:
            repair(repairs, runs, kinds[kind], seed)
    return repairs


def not_made(repairs: Repairs, reference: Run, parallel: Run) -> str:
    """Return a sentence about a change that a run did not apply; empty if all were applied."""
    asked = [(repairs.reference, reference.ranks[0]), *zip(repairs.ranks, parallel.ranks, strict=True)]
    for case, rank in asked:
        where = f"rank {rank.rank} of {parallel.world_size}" if rank is not reference.ranks[0] else "the single device"
        missing = set(case.weights) - set(rank.notes.get("changed weights", ()))
        if missing:
            return f"{where} does not call the model that has {min(missing)} before its first step"
        if rank.notes.get("shared losses", 1.0) != case.share:
            return f"{where} calls no backward"
        if rank.notes.get("changed outputs", 0) != len(case.outputs):
            return f"{where} does not make the same outputs again"
    return ""


# -- parameters --------------------------------------------------------------------------------------------------------


def _weights(repairs: Repairs, runs: PairedRuns, spots: Sequence[BlindSpot], seed: int) -> None:
    """Add random values to every trained parameter whose initial values are all equal."""
    del spots
    names: list[str] = []
    unknown: list[str] = []
    for name, array in _constants(runs, seed).items():
        parts = _parts(runs, name)
        if parts is None:
            unknown.append(name)
            continue
        names.append(name)
        repairs.reference = _with_weight(repairs.reference, name, array)
        for rank, (own, placement) in parts.items():
            repairs.ranks[rank] = _with_weight(repairs.ranks[rank], own, placement.take(array))
    if names:
        repairs.words["constant-parameters"] = f"{_listed(names)} get random values around their constant ones"
    if unknown:
        repairs.left["constant-parameters"] = f"which part of {_listed(unknown)} a rank has cannot be determined"


def spread_constant(array: Any, seed: int, name: str) -> Any:
    """Return a parameter of equal values with random values added, in its dtype; other parameters unchanged.

    Args:
        array: the global parameter; a rank takes its shard of the result.
        seed: seed of the case.
        name: name of the parameter.
    """
    array = np.asarray(array)
    if array.dtype.kind != "f" or array.size < 2 or (array != array.flat[0]).any():
        return array
    noise = np.random.default_rng(seed_of(seed, "spread", name)).standard_normal(array.shape)
    return (array + SPREAD * (abs(float(array.flat[0])) or 1.0) * noise).astype(array.dtype)


def _constants(runs: PairedRuns, seed: int) -> dict[str, Any]:
    frozen = runs.reference_notes.get("frozen parameters", ())
    spread = {}
    for (kind, name, step, _), record in runs.bounds.reference.items():
        if kind == "weight" and step == -1 and name not in frozen:
            value = np.asarray(record.value)
            changed = spread_constant(value, seed, name)
            if changed is not value:
                spread[name] = changed
    return spread


def _parts(runs: PairedRuns, name: str) -> dict[int, tuple[str, Placement]] | None:
    """Return each rank's own name and placement of a parameter; None if a placement is not known."""
    key = ("weight", name, -1, 0)
    parts: dict[int, tuple[str, Placement]] = {}
    for rank in runs.holders(key):
        placement = runs.parameters.of(name, rank)
        if placement is None or placement.pending or not placement.compared:
            return None
        parts[rank] = _own_name(runs, rank, name), placement
    return parts


def _own_name(runs: PairedRuns, rank: int, name: str) -> str:
    """Return a rank's own name of a parameter, which may differ because pipeline stages count their own layers."""
    records: Sequence[Record] = runs.parallel.ranks[rank].records
    return next(
        record.name for record in records if record.is_initial_weight and renamed(record, runs.names[rank]).name == name
    )


def _with_weight(case: CaseChanges, name: str, array: Any) -> CaseChanges:
    return replace(case, weights={**case.weights, name: np.ascontiguousarray(array)})


# -- losses ------------------------------------------------------------------------------------------------------------


def _shares(repairs: Repairs, runs: PairedRuns, spots: Sequence[BlindSpot], seed: int) -> None:
    """Weight the losses of ranks that do the same work, so that only their mean is the reference's."""
    del seed
    if not all(_has_backward(rank) for rank in runs.ranks):
        repairs.left["equal-data"] = "the losses enter no backward that the recorder can weight"
        return
    for spot in spots:
        if not spot.refused:
            repairs.left["equal-data"] = f"whether the ranks of {spot.subject} do the same work cannot be determined"
            continue
        for group in runs.axes.groups[spot.subject]:
            for rank, share in zip(group, shares(len(group)), strict=True):
                repairs.ranks[rank] = replace(repairs.ranks[rank], share=repairs.ranks[rank].share * share)
        repairs.shared += (spot.subject,)
    if repairs.shared:
        sizes = [len(runs.axes.groups[axis][0]) for axis in repairs.shared]
        factors = ", ".join(f"{share:g}" for share in shares(sizes[0]))
        repairs.words["equal-data"] = (
            f"the losses of the ranks along {' and '.join(repairs.shared)} are multiplied by {factors} in the backward"
        )


def shares(count: int) -> list[float]:
    """Return different positive factors with mean 1, for the losses of ``count`` ranks that do the same work.

    The factors are multiples of a power of two, so that their sum is exactly ``count``.
    """
    step = 2.0 ** -math.ceil(math.log2(max(count, 2)))
    return [1.0 + (2 * place - (count - 1)) * step / 2 for place in range(count)]


def _has_backward(index: Mapping[Any, Record]) -> bool:
    return any(key[0] == "loss" for key in index)


def _cotangents(repairs: Repairs, runs: PairedRuns, spots: Sequence[BlindSpot], seed: int) -> None:
    """Multiply the outputs that a loss adds up by random numbers."""
    (spot,) = spots[:1]
    keys = [key for key in runs.bounds.reference if key[:2] == ("output", spot.subject)]
    factors: dict[int, dict[tuple[str, int, int], Any]] = {rank: {} for rank in range(len(runs.ranks))}
    whole = {}
    for key in keys:
        value = np.asarray(runs.bounds.reference[key].value)
        whole[key[1:]] = random_cotangent(value.shape, seed_of(seed, key[2], key[3]), key[1]).astype(value.dtype)
        for rank in runs.holders(key):
            placement = runs.placement(key, rank)
            if placement is None or placement.pending or runs.ranks[rank][key].region is not None:
                repairs.left["constant-cotangents"] = f"which part of {spot.subject}'s output a rank has is unknown"
                return
            factors[rank][key[1:]] = placement.take(whole[key[1:]])
    repairs.reference = replace(repairs.reference, outputs=whole)
    repairs.ranks = [replace(case, outputs=factors[rank]) for rank, case in enumerate(repairs.ranks)]
    repairs.words["constant-cotangents"] = f"the output of {spot.subject} is multiplied by random numbers"


def random_cotangent(shape: Sequence[int], seed: int, name: str) -> Any:
    """Return a float64 array of random factors of both signs for an output, equal in every run and layout.

    Args:
        shape: shape of the global output; a rank takes its shard.
        seed: seed of the case.
        name: name of the output.
    """
    return np.random.default_rng(seed_of(seed, "cotangent", name)).standard_normal(tuple(shape))


# -- inputs ------------------------------------------------------------------------------------------------------------


def _inputs(repairs: Repairs, runs: PairedRuns, spots: Sequence[BlindSpot], seed: int) -> None:
    names = [spot.subject for spot in spots]
    why = _not_views(runs, names, "f")
    if why:
        repairs.left["symmetric-inputs"] = why
        return
    _everywhere(repairs, input_seed=seed_of(seed, "inputs") % (1 << 32))
    repairs.words["symmetric-inputs"] = "random numbers are added to floating inputs, by their place in memory"


def _masks(repairs: Repairs, runs: PairedRuns, spots: Sequence[BlindSpot], seed: int) -> None:
    names = [spot.subject for spot in spots if spot.subject != "dropout"]
    if not names:
        return
    why = _not_views(runs, names, "bi")
    if why:
        repairs.left["equal-masks"] = why
        return
    _everywhere(repairs, mask_seed=seed_of(seed, "masks") % (1 << 32))
    repairs.words["equal-masks"] = f"{_listed(names)} select fewer elements, by their place in memory"


def _not_views(runs: PairedRuns, names: Sequence[str], kinds: str) -> str:
    """Return why inputs cannot be changed by position in memory; empty if all ranks have views of the same batch."""
    kind_of = {name: array.dtype.kind for _, name, array in runs.reference_notes.get("inputs", ())}
    other = [name for name in names if kind_of.get(name, "") not in kinds]
    if other:
        return f"{_listed(other)} holds no numbers to which noise can be added"
    memory = runs.reference_notes.get("sizes of input memory")
    for rank in runs.parallel.ranks:
        if memory is None or rank.notes.get("sizes of input memory") != memory:
            return f"the inputs of rank {rank.rank} are no views of the single device's batch"
    return ""


def _everywhere(repairs: Repairs, **fields: Any) -> None:
    repairs.reference = replace(repairs.reference, **fields)
    repairs.ranks = [replace(case, **fields) for case in repairs.ranks]


def _strides(repairs: Repairs, runs: PairedRuns, spots: Sequence[BlindSpot], seed: int) -> None:
    """Make the inputs of the ranks, but not of the reference, non-contiguous."""
    del runs, spots, seed
    repairs.ranks = [replace(case, strided=True) for case in repairs.ranks]
    repairs.words["contiguous-inputs"] = "inputs of the ranks' models are not contiguous"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


_Repair = Callable[[Repairs, PairedRuns, Sequence[BlindSpot], int], None]
_REPAIRS: dict[str, _Repair] = {
    "constant-parameters": _weights,
    "equal-data": _shares,
    "constant-cotangents": _cotangents,
    "symmetric-inputs": _inputs,
    "equal-masks": _masks,
    "contiguous-inputs": _strides,
}
"""The repair of each kind of blind spot."""

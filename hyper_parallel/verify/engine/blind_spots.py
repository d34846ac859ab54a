"""Blind spots of a case: data, sizes and weights for which a broken program still gives the results of a single device.

Ranks with equal data hide a missing average. Equal axis sizes hide a reduction over the wrong axis. Dims that divide
evenly hide a wrong shard boundary. Each blind spot is found in the records of a comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.store import is_constant, largest, same_values
from hyper_parallel.verify.frameworks.contract.case_changes import IGNORED_LABEL

__all__ = ["ALL_PARAMETERS", "BLIND", "BlindSpot", "blind_spots", "symmetry"]

ALL_PARAMETERS = "all parameters"
"""Name under which a backward's gradients are recorded if the recorder does not know their parameters."""

BLIND = {
    "equal-data": "a missing or doubled average over the axis",
    "equal-sizes": "a reduction over the wrong axis, a rank taken from the wrong group",
    "even-dims": "wrong boundaries of uneven shards, averages weighted wrongly",
    "constant-cotangents": "wrong scales and shapes in the backward",
    "constant-parameters": "errors in gradients that flow through constant parameters",
    "symmetric-inputs": "permuted rows, another rank's rows",
    "one-step": "stale values, weights that are not updated, replicas that drift",
    "equal-masks": "divisions by local instead of global counts",
    "contiguous-inputs": "code that ignores strides",
    "zero-gradients": "errors in gradients that are zero",
    "untrained-parameters": "errors in weights that no step changes",
}
"""The errors that each kind of blind spot hides."""


@dataclass(frozen=True)
class BlindSpot:
    """One property of a case that hides errors.

    Attributes:
        kind: one of :data:`BLIND`.
        subject: axis, parameter, input or output concerned; empty if it concerns the entire case.
        facts: the finding, with names and sizes.
        repair: the change that removes it.
        refused: True if this blind spot makes the result inconclusive even though nothing differs.
    """

    kind: str
    subject: str
    facts: str
    repair: str
    refused: bool = False

    def __str__(self) -> str:
        """Return one line."""
        return f"{BLIND[self.kind]}: {self.facts}; {self.repair}"


def blind_spots(runs: PairedRuns) -> list[BlindSpot]:
    """Return the blind spots of a comparison, in the order of :data:`BLIND`."""
    spots = [
        *_equal_data(runs),
        *_equal_sizes(runs),
        *_even_dims(runs),
        *_constant_cotangents(runs),
        *_constant_parameters(runs),
        *_symmetric_inputs(runs),
        *_one_step(runs),
        *_equal_masks(runs),
        *_contiguous_inputs(runs),
        *_zero_gradients(runs),
        *_untrained_parameters(runs),
    ]
    order = list(BLIND)
    return sorted(spots, key=lambda spot: order.index(spot.kind))


def _proper_axes(runs: PairedRuns) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the axes of more than one rank; axis ``world`` only if there is no other axis."""
    axes = {axis: groups for axis, groups in runs.axes.groups.items() if max(map(len, groups)) > 1}
    return {axis: groups for axis, groups in axes.items() if axis != "world"} or axes


def _equal_data(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield axes along which every output and input is equal, so that the ranks do the same work."""
    outputs = [key for key in runs.bounds.reference if key[0] in {"output", "value", "mask"}]
    for axis, groups in _proper_axes(runs).items():
        keys = [key for key in outputs if any(key in runs.ranks[rank] for group in groups for rank in group)]
        if keys and all(_equal_on(runs, key, group) for key in keys for group in groups):
            yield BlindSpot(
                "equal-data",
                axis,
                f"all ranks along {axis} compute the same outputs ({len(keys)} compared)",
                f"give each rank of {axis} its own part of one batch",
                refused=all(_same_work(runs, group) for group in groups),
            )


def _same_work(runs: PairedRuns, group: tuple[int, ...]) -> bool:
    """Return whether the ranks of a group certainly do the same work: their gradients are equal before reductions.

    ``fully_shard`` gathers parameters for the forward, so equal outputs of all modules mean equal work. This is so both
    for ranks that together have one copy of a parameter and for ranks that have the same shard of different copies.
    """
    notes = [runs.parallel.ranks[rank].notes for rank in group]
    own = [note.get("own gradients", {}) for note in notes]
    copies = notes[0].get("fully sharded parameters", {}).items()
    sharded = {name for name, ranks in copies if _ordered(group) in map(_ordered, ranks)}
    replicated = {name for name, ranks in copies if _ordered(group) in map(_ordered, zip(*ranks, strict=True))}
    trained = {key[1] for rank in group for key in runs.ranks[rank] if key[0] == "gradient"}
    noted = trained if own[0].get(ALL_PARAMETERS) else set(own[0])
    weights = [key for key in runs.bounds.reference if key[0] == "weight" and key[2] == -1 and key[1] not in sharded]
    return (
        bool(trained)
        and trained <= noted | sharded | replicated
        and all(gradients == own[0] for gradients in own)
        and all(key in runs.ranks[rank] for key in weights for rank in group)
        and all(_equal_on(runs, key, group) for key in weights)
    )


def _ordered(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _equal_on(runs: PairedRuns, key: Any, group: tuple[int, ...]) -> bool:
    arrays = [runs.ranks[rank][key].value for rank in group if key in runs.ranks[rank]]
    return all(same_values(array, arrays[0]) for array in arrays[1:])


def _equal_sizes(runs: PairedRuns) -> Iterator[BlindSpot]:
    sizes = {axis: max(map(len, groups)) for axis, groups in _proper_axes(runs).items()}
    for axis, size in sizes.items():
        same = [other for other, other_size in sizes.items() if other_size == size]
        if same[0] == axis and len(same) > 1:
            facts = f"axes {' and '.join(same)} both have size {size}"
            yield BlindSpot("equal-sizes", axis, facts, "use a mesh with different sizes, such as 2x3")


def _even_dims(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield axes along which all shards of every sharded dim have equal sizes."""
    names = [*{key[:2]: key for key in runs.bounds.reference if key[0] in {"weight", "output", "value"}}.values()]
    for axis, groups in _proper_axes(runs).items():
        sharded: dict[str, bool] = {}
        for key in names:
            for group in groups:
                holders = [rank for rank in group if key in runs.ranks[rank]]
                places = [runs.placement(key, rank) for rank in holders]
                if any(place is None or places[0] is None or not place.same_place(places[0]) for place in places):
                    sizes = {np.shape(runs.ranks[rank][key].value) for rank in holders}
                    sharded[key[1]] = sharded.get(key[1], True) and len(sizes) == 1
        if sharded and all(sharded.values()):
            facts = f"what is sharded over {axis} divides evenly: {', '.join(list(sharded)[:4])}"
            repair = f"choose a batch, sequence or width that {max(map(len, groups))} does not divide"
            yield BlindSpot("even-dims", axis, facts, repair)


def _constant_cotangents(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield losses that are the plain sum or mean of an output, so that all elements of its gradient are equal."""
    reference = runs.bounds.reference
    losses = [key for key in reference if key[0] == "loss"]
    plain: list[str] = []
    for loss in losses:
        before = [
            key for key in reference if key[0] == "output" and key[2:] == loss[2:] and np.size(reference[key].value)
        ]
        value = float(np.asarray(reference[loss].value).item())
        plain += itertools.islice((key[1] for key in reversed(before) if _is_sum(reference[key].value, value)), 1)
    if losses and len(plain) == len(losses):
        facts = f"the loss is the sum or mean of the output of {plain[0]}"
        yield BlindSpot("constant-cotangents", plain[0], facts, "weight the output with random numbers in the loss")


def _is_sum(output: Any, loss: float) -> bool:
    array = np.asarray(output)
    if array.dtype.kind != "f" or array.size < 2:
        return False
    scale = 1e-6 if array.dtype.itemsize < 8 else 1e-12
    sums = (float(array.sum()), float(array.mean()))
    return any(abs(number - loss) <= scale * max(abs(loss), float(np.abs(array).mean())) for number in sums)


def _constant_parameters(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield parameters whose elements all have the same value in every forward."""
    reference = runs.bounds.reference
    last = max((key[2] for key in reference if key[0] == "weight"), default=-1)
    values: dict[str, list[Any]] = {}
    for (kind, name, step, _), record in reference.items():
        if kind == "weight" and (step < last or step == -1):
            values.setdefault(name, []).append(record.value)
    for name, arrays in values.items():
        if all(is_constant(array) for array in arrays) and arrays[0].size > 1:
            facts = f"every element of {name} is {np.asarray(arrays[-1]).flat[0]:g} in every step"
            yield BlindSpot("constant-parameters", name, facts, "initialise it at random, or run more steps")


def _symmetric_inputs(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield inputs of the reference that do not change when rows are swapped."""
    for name, array in _inputs(runs.reference_notes).items():
        spot = symmetry(name, array)
        if spot is not None:
            yield spot


def symmetry(name: str, array: Any) -> BlindSpot | None:
    """Return the blind spot of an input that is unchanged when rows are swapped; None for other inputs.

    Args:
        name: name of the input.
        array: its global value, of any shape and dtype.
    """
    for dim in range(array.ndim):
        if array.shape[dim] > 1 and np.array_equal(array, np.flip(array, dim)):
            facts = f"{name} does not change when dim {dim} is reversed"
            return BlindSpot("symmetric-inputs", name, facts, "draw inputs at random")
    if array.ndim == 2 and array.shape[0] == array.shape[1] > 1 and np.array_equal(array, array.T):
        return BlindSpot("symmetric-inputs", name, f"{name} equals its transpose", "draw inputs at random")
    return None


def _one_step(runs: PairedRuns) -> Iterator[BlindSpot]:
    steps = {key[2] for key in runs.bounds.reference if key[0] in {"gradient", "weight"} and key[2] >= 0}
    if len(steps) < 2:
        facts = f"{'only one' if steps else 'no'} optimizer step was compared"
        yield BlindSpot("one-step", "", facts, "run at least two")


def _equal_masks(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield boolean inputs that select equally many elements on every rank, and dropout that drops nothing."""
    counts: dict[str, set[int]] = {}
    for rank in runs.parallel.ranks:
        for name, array in _inputs(rank.notes).items():
            if array.dtype.kind == "b" or (array.dtype.kind == "i" and (array == IGNORED_LABEL).any()):
                selected = array if array.dtype.kind == "b" else array != IGNORED_LABEL
                counts.setdefault(name, set()).add(int(selected.sum()))
    for name, numbers in counts.items():
        if len(numbers) == 1 and runs.parallel.world_size > 1:
            facts = f"{name} selects {next(iter(numbers))} elements on every rank"
            yield BlindSpot("equal-masks", name, facts, "let ranks have different numbers of valid elements")
    masks = [record for key, record in runs.bounds.reference.items() if key[0] == "mask"]
    if masks and all(np.asarray(record.value).all() for record in masks):
        yield BlindSpot("equal-masks", "dropout", "dropout keeps every element", "raise its probability above 0")


def _contiguous_inputs(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield a blind spot if all inputs are contiguous, as far as the recorder reports strides."""
    notes = [rank.notes.get("contiguous inputs") for rank in runs.parallel.ranks]
    if notes and all(note is True for note in notes):
        facts = "every input of the model is contiguous on every rank"
        yield BlindSpot("contiguous-inputs", "", facts, "pass one transposed or sliced, with the same values")


def _zero_gradients(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield parameters whose gradient is zero, or missing, in every step of the reference.

    One blind spot covers all parameters without a gradient that are in no optimizer or were created after the last
    step, such as those of a second model for evaluation.
    """
    most: dict[str, float] = {}
    for (kind, name, _, _), record in runs.bounds.reference.items():
        if kind == "gradient" and np.size(record.value):
            most[name] = max(most.get(name, 0.0), largest(record.value))
    weights: dict[str, list[int]] = {}  # the steps after which each parameter is recorded
    for kind, name, step, _ in runs.bounds.reference:
        if kind == "weight":
            weights.setdefault(name, []).append(step)
    notes = runs.reference_notes
    last = max(map(max, weights.values()), default=-1)
    late = {name for name, steps in weights.items() if 0 <= last == min(steps)}
    partitioned = set(notes.get("parameters trained by partitions", ())) - set(most)
    elsewhere = {*notes.get("frozen parameters", ()), *partitioned}
    nothing = not any(most.values())
    unowned = {*notes.get("parameters that no optimizer has", ()), *late} - set(most) - elsewhere
    untrained = [name for name in weights if name in unowned]
    if untrained and most:
        several = len(untrained) > 1
        named = f"{untrained[0]} and {len(untrained) - 1} more" if several else untrained[0]
        facts = f"{named} {'have' if several else 'has'} no gradient and {'are' if several else 'is'} not trained"
        repair = f"give {'them' if several else 'it'} to an optimizer, or freeze {'them' if several else 'it'}"
        yield BlindSpot("zero-gradients", untrained[0], facts, repair)
    elsewhere.update(untrained)
    for name in weights:
        if name not in elsewhere and most and not most.get(name, 0.0):
            what = "zero in every step" if name in most else "missing in every step"
            facts = f"the gradient of {name} is {what}"
            repair = "make the loss depend on it, or freeze it"
            yield BlindSpot("zero-gradients", name, facts, repair, refused=nothing)


def _untrained_parameters(runs: PairedRuns) -> Iterator[BlindSpot]:
    """Yield parameters that no step changes, for example because the optimizer was created before sharding.

    Such a program creates its optimizer too early on a single device as well, so both runs are equal.
    """
    start: dict[str, Any] = {}
    changed: set[str] = set()
    for (kind, name, _, _), record in runs.bounds.reference.items():
        if kind == "weight" and not same_values(start.setdefault(name, record.value), record.value):
            changed.add(name)
    foreign = [tuple(shape) for shape in runs.reference_notes.get("parameters that no model has", ())]
    for name in runs.reference_notes.get("parameters that no optimizer has", ()):
        if name not in start or name in changed:
            continue
        shape = np.shape(start[name])
        if shape in foreign:
            facts = f"no step changes {name}, and an optimizer has a parameter {list(shape)} that is in no model"
            repair = "create the optimizer after parallelize_module, fully_shard or whatever else replaces parameters"
            yield BlindSpot("untrained-parameters", name, facts, repair, refused=True)
    if start and not changed and not foreign and runs.reference_notes.get("optimizer steps"):
        yield BlindSpot("untrained-parameters", "", "no step changes any parameter", "use a learning rate above 0")


def _inputs(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded inputs of the first call by name."""
    arrays: dict[str, Any] = {}
    for _, name, array in notes.get("inputs", ()):
        arrays.setdefault(str(name), np.asarray(array))
    return arrays

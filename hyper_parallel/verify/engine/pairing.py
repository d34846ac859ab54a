"""The reference and the parallel run, paired: records by key, tolerances, axes and placements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.activations import ActivationPlacements
from hyper_parallel.verify.engine.axes import Axes
from hyper_parallel.verify.engine.bounds import Bounds, Key, WholeBound, index_records
from hyper_parallel.verify.engine.declared import declaration_of, parse_declaration
from hyper_parallel.verify.engine.distance import Distance, distance, energy_of, share_of_movement, whole_distance
from hyper_parallel.verify.engine.padding import without_padding
from hyper_parallel.verify.engine.placement import (
    ParameterPlacements,
    Placement,
    declared_placement,
    piece_placement,
    region_placement,
    renamed,
    renamed_path,
    whole,
)
from hyper_parallel.verify.engine.store import digest_of, is_constant, same_values
from hyper_parallel.verify.frameworks.contract.records import DECISIONS, Record, Run

__all__ = ["PairedRuns", "factor_of", "last_gradients_aligned"]

_FOLLOW = ("gradient", "state", "weight", "buffer", "saved")
_NONE: Any = object()
_ALIKE = 0.01
"""Largest deviation of a clipped gradient from a multiple of the gradient before clipping, relative to its largest
element: half precision rounds both.
"""
_SCALARS = ("loss", "norm", "rate")


class PairedRuns:
    """A reference and a parallel run, ready to be compared.

    Args:
        reference: a run on one rank.
        perturbed: repeats of the reference, or the tolerances that were measured by them.
        parallel: the run to compare.
        mesh: sizes of the axes, in order; with None, the groups that the ranks recorded are used.
        declared: placements by pattern of names.
        earlier: the same runs paired with smaller tolerances; values that were within them are not measured again.

    Attributes:
        bounds: tolerances; ``bounds.reference`` has the reference's records.
        ranks: each rank's records by key, under the reference's names.
        axes: groups of ranks.
        parameters: placements of weights and buffers.
        activations: placements of outputs, masks and values.
        reference_notes: the reference's notes.
        names: for each rank, the reference's name of each renamed module.
        padding: descriptions of rows that only ranks have.

    Raises:
        ValueError: the reference has more than one rank or no records, a declaration cannot be read, or the mesh has a
            different number of ranks.
    """

    def __init__(
        self,
        reference: Run,
        perturbed: Sequence[Run] | Bounds,
        parallel: Run,
        mesh: Mapping[str, int] | None,
        declared: Mapping[str, str] | None,
        earlier: PairedRuns | None = None,
    ) -> None:
        if reference.world_size != 1 or not reference.ranks[0].records:
            raise ValueError(
                f"the reference must be a run on one rank that recorded values; this one has {reference.world_size} "
                f"ranks and {sum(len(rank.records) for rank in reference.ranks)} records"
            )
        self.parallel = parallel
        self.reference_notes = reference.ranks[0].notes
        self.bounds = perturbed if isinstance(perturbed, Bounds) else Bounds(reference, perturbed)
        self.bounds.require_repeats()
        self.axes = Axes(parallel, mesh)
        lines = {
            pattern: parse_declaration(words, tuple(self.axes.groups)) for pattern, words in (declared or {}).items()
        }
        found = ((key[:2], declaration_of(key[0], key[1], lines)) for key in self.bounds.reference)
        self.declared = {name: declaration for name, declaration in found if declaration is not None}
        self._energies: dict[Key, float] = {}
        self._within: dict[Key, dict[int, Distance | None]] = {} if earlier is None else dict(earlier._within)  # noqa: SLF001
        self.names = _stage_names(reference.ranks[0].records, [rank.records for rank in parallel.ranks])
        self.ranks = [
            index_records([renamed(record, names) for record in rank.records if record.kind not in DECISIONS])
            for rank, names in zip(parallel.ranks, self.names, strict=True)
        ]
        if "optimizers that call the model" not in self.reference_notes:
            self.ranks = [last_gradients_aligned(index, self.bounds.reference) for index in self.ranks]
        self.ranks, self.padding, self._padded_gradients = without_padding(self.bounds.reference, self.ranks, self.axes)
        self.parameters = ParameterPlacements(self.bounds.reference, self.ranks, self.axes, self.declared)
        self.activations = ActivationPlacements(self.bounds, self.ranks, self.axes, self.declared)

    def padded_rows_have_gradients(self, step: int) -> bool:
        """Return whether rows of padding, which are not compared, have nonzero gradients in a step."""
        return any(when == step for _, when in self._padded_gradients)

    def holders(self, key: Key) -> list[int]:
        """Return the ranks that have a value."""
        return [rank for rank, index in enumerate(self.ranks) if key in index]

    def calls(self, value: tuple[str, str, int]) -> Iterator[Key]:
        """Yield the keys of all calls of a value in one step of the reference; ``value`` is its kind, name and step."""
        return takewhile(self.bounds.reference.__contains__, ((*value, call) for call in count()))

    def noted(self, rank: int, subject: str) -> set[str]:
        """Return the names that a rank's recorder noted under ``subject``, mapped to the reference's names."""
        names = self.parallel.ranks[rank].notes.get(subject, ())
        return {renamed_path(name, self.names[rank]) for name in names}

    def value(self, key: Key, rank: int) -> Any:
        """Return a rank's array."""
        return np.asarray(self.ranks[rank][key].value)

    def placement(self, key: Key, rank: int) -> Placement | None:
        """Return the placement of a value on a rank; None if it cannot be determined."""
        kind, name, _, _ = key
        record, total = self.ranks[rank][key], np.shape(self.bounds.reference[key].value)
        if kind not in _FOLLOW:
            return whole(total) if kind in _SCALARS else self.activations.of(key, rank)
        declaration = self.declared.get((kind, name))
        if declaration is not None:
            shapes = {other: np.shape(self.ranks[other][key].value) for other in self.holders(key)}
            return declared_placement(declaration, rank, shapes, total, self.axes)
        if record.region is not None and record.region.shape == total:
            return region_placement(record.region, np.shape(record.value))
        owner = self.parameters.owner(name)
        local, part = self.parameters.shapes.get((owner, rank)), self.parameters.of(owner, rank)
        if part is not None and part.shape != total:
            part = None
        if record.region is not None and part is not None and local is not None:
            return piece_placement(part, local, record.region, np.shape(record.value))
        if part is not None and np.shape(record.value) == local:
            return part
        return whole(total) if np.shape(record.value) == total else None

    def expected(self, key: Key, placement: Placement) -> tuple[Any, Any]:
        """Return the reference's shard of a value, and the tolerance of its elements."""
        return placement.take(self.bounds.reference[key].value), placement.take(self.bounds.allowed(key))

    def actual(self, key: Key, rank: int, placement: Placement) -> Any | None:
        """Return a rank's value after its pending sums; None if a rank of the group does not have the value."""
        value = self.value(key, rank)
        for group in placement.pending:
            if any(key not in self.ranks[other] for other in group):
                return None
            parts = [self.value(key, other) for other in group]
            if any(part.shape != value.shape for part in parts):
                return None
            value = np.sum(parts, axis=0)
        return value

    def distance(self, key: Key, rank: int) -> Distance | None:
        """Return the distance of a rank's value from the reference's; None if its placement cannot be determined."""
        placement = self.placement(key, rank)
        if placement is None or not placement.compared:
            return None
        expected, allowed = self.expected(key, placement)
        actual = self.actual(key, rank, placement)
        if actual is None:
            return None
        measured = distance(actual, expected, allowed, self.bounds.floor(key))
        return self.with_whole(key, measured, actual, expected, allowed)

    def with_whole(self, key: Key, measured: Distance, actual: Any, expected: Any, allowed: Any) -> Distance:
        """Return the distance of the elements, or of the complete tensor if it is larger and all elements are right.

        Args:
            key: key of the value.
            measured: the distance of the elements.
            actual: a rank's shard of the value.
            expected: the array that it should equal.
            allowed: tolerances of the elements of ``expected``.
        """
        if measured.ratio > 1.0:
            return measured
        bound = self.bounds.whole(key) if actual.dtype.kind == expected.dtype.kind == "f" and actual.size > 1 else None
        if bound is None or not np.isfinite(bound.norm) or not np.isfinite(expected).all():
            return measured
        if key not in self._energies:
            self._energies[key] = energy_of(self.bounds.reference[key].value)
        as_whole = whole_distance(actual, expected, bound, self._energies[key])
        whole = self.bounds.reference[key].value
        if as_whole is not None and as_whole.ratio > 1.0 and actual.size < np.size(whole):
            noise = share_of_movement(expected, allowed, whole, self.bounds.allowed(key))
            before, shared = self._before_clipping(key), 0.0
            if before is not None:
                shared = before.scale + bound.scale
                bound = WholeBound(max(before.scale, bound.scale), max(before.norm, bound.norm))
            as_whole = whole_distance(actual, expected, bound, self._energies[key], shared, noise)
        return measured if as_whole is None or as_whole.ratio <= measured.ratio else as_whole

    def _before_clipping(self, key: Key) -> WholeBound | None:
        """Return the complete-tensor tolerance of the gradient before clipping; None if there is no such gradient.

        Clipping replaces a gradient ``g`` by ``g * limit / norm``. If one parameter contributes most of the norm, its
        clipped gradient hardly moves along itself in the repeats, however its shards move. Let ``p``, ``w`` and ``n``
        be the relative errors of a shard of ``g``, of the complete ``g`` and of the norm. After clipping, the errors
        are ``p - n`` and ``w - n``. So a shard is off by at most ``|p| + |n|``, and ``|n| <= |w| + |w - n|``: the sum
        of the shard's tolerance before clipping and of the complete tensor's tolerances before and after clipping.
        """
        before = (*key[:3], key[3] - 1)
        if key[0] != "gradient" or before not in self.bounds.reference:
            return None
        own, other = (np.asarray(self.bounds.reference[one].value, np.float64) for one in (key, before))
        sizes = float(np.linalg.norm(own)), float(np.linalg.norm(other))
        if own.shape != other.shape or not all(sizes) or not np.isfinite(sizes).all():
            return None
        own, other = own / sizes[0], other / sizes[1]
        multiple = np.abs(own - other).max() <= _ALIKE * np.abs(own).max()
        return self.bounds.whole(before) if multiple else None

    def distances(self, key: Key) -> dict[int, Distance | None]:
        """Return the distance on each rank that has a value; ranks with the same bits of the same shard share one."""
        if key in self._within:
            return dict(self._within[key])
        known: list[tuple[bytes, Placement, Distance | None]] = []
        distances: dict[int, Distance | None] = {}
        for rank in self.holders(key):
            placement, digest = self.placement(key, rank), digest_of(self.ranks[rank][key].value)
            if placement is None or placement.pending:
                distances[rank] = self.distance(key, rank)
                continue
            same = (found for own, place, found in known if own == digest and place.same_place(placement))
            found = next(same, _NONE)
            if found is _NONE:
                found = self.distance(key, rank)
                known.append((digest, placement, found))
            distances[rank] = found
        if key[0] in _FOLLOW and all(found is not None and found.ratio <= 1 for found in distances.values()):
            self._within[key] = dict(distances)  # placements of these kinds do not depend on tolerances
        return distances

    def factor(self, key: Key, rank: int) -> float | None:
        """Return the factor between the reference's value and a rank's; None if the rank's is not a multiple."""
        placement = self.placement(key, rank)
        actual = None if placement is None else self.actual(key, rank, placement)
        if placement is None or actual is None or actual.dtype.kind != "f":
            return None
        expected, allowed = self.expected(key, placement)
        return factor_of(actual, expected, allowed)

    def replicas(self, key: Key) -> Iterator[tuple[Placement, list[int]]]:
        """Yield sets of ranks that have the same shard of a value."""
        groups: list[tuple[Placement, list[int]]] = []
        for rank in self.holders(key):
            placement = self.placement(key, rank)
            if placement is None or placement.pending or not placement.compared:
                continue
            same = next((ranks for other, ranks in groups if other.same_place(placement)), None)
            if same is None:
                groups.append((placement, [rank]))
            else:
                same.append(rank)
        yield from groups


def last_gradients_aligned(index: Mapping[Key, Record], reference: Mapping[Key, Record]) -> dict[Key, Record]:
    """Return a rank's records, with its last gradients of a step numbered like the reference's last gradients.

    Gradients that a function of the framework clips are recorded before and after clipping, but a rank may clip in a
    different way and record them once.
    """
    last, own = _last_calls(reference), _last_calls(index)
    aligned: dict[Key, Record] = {}
    for key, record in index.items():
        call = key[3] + last.get(key[:3], own.get(key[:3], 0)) - own.get(key[:3], 0) if key[0] == "gradient" else key[3]
        if call >= 0:
            aligned[key if call == key[3] else (*key[:3], call)] = record
    return aligned


def _last_calls(index: Mapping[Key, Record]) -> dict[tuple[str, str, int], int]:
    calls: dict[tuple[str, str, int], int] = {}
    for key in index:
        if key[0] == "gradient":
            calls[key[:3]] = max(calls.get(key[:3], 0), key[3])
    return calls


def factor_of(actual: Any, expected: Any, allowed: Any) -> float | None:
    """Return the factor between ``expected`` and ``actual``; None if no factor fits within the tolerance."""
    if actual.shape != expected.shape or not np.any(expected):
        return None
    place = np.unravel_index(int(np.abs(expected).argmax()), expected.shape)
    factor = float(actual[place] / expected[place])
    slack = (1 + abs(factor)) * np.maximum(allowed, allowed[place] / abs(expected[place]) * np.abs(expected))
    return factor if np.isfinite(factor) and (np.abs(actual - factor * expected) <= slack).all() else None


def _stage_names(reference: Sequence[Record], ranks: Sequence[Sequence[Record]]) -> list[dict[str, str]]:
    """Return, for each rank, the reference's names of modules that have a different name there.

    Names differ if pipeline stages count their own layers, or if a rank calls a submodule of the model directly. A
    weight is mapped by equal initial values, and only to a name that differs in numbers or in the path before its last
    parts. This is tried only if some weight of the reference is on no rank under its own name. The mapping is used if
    all of the reference's weights are then on some rank. An output layer that shares the embedding's weight has no
    weight of its own in the reference. Such a module keeps its name, and only its weight is renamed.
    """
    weights = {record.name: record.value for record in reference if record.is_initial_weight}
    own = [{record.name: record.value for record in records if record.is_initial_weight} for records in ranks]
    plain: list[dict[str, str]] = [{} for _ in ranks]
    if not weights or set(weights) <= {name for index in own for name in index}:
        return plain
    owners = {_owner(name) for name in weights}
    without = {record.module for record in reference if record.kind == "output"} - owners
    mapped: list[dict[str, str]] = []
    held: set[str] = set()
    for index in own:
        modules: dict[str, str] = {}
        for name, value in index.items():
            target = name if _same(weights, name, value) else next(_equal_names(name, value, weights), name)
            if target != name:
                modules.update([(name, target) if _owner(name) in without else _changed_prefix(name, target)])
        if "" in modules:  # all names get a prefix; constants, such as the ones of a norm, match under several names
            other = {name: f"{modules['']}.{name}" for name in index}
            moved = [name for name, value in index.items() if _same(weights, other[name], value)]
            kept = [name for name, value in index.items() if _same(weights, name, value) and name not in moved]
            modules = {**{name.partition(".")[0]: name.partition(".")[0] for name in kept}, **modules}
        held.update(renamed_path(name, modules) for name in index)
        mapped.append(modules)
    return mapped if set(weights) <= held else plain


def _same(weights: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in weights and same_values(weights[name], value)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _equal_names(name: str, value: Any, weights: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of the reference's weights with equal values: first those that differ only in numbers."""
    pattern = re.sub(r"\d+", "#", name)
    if is_constant(value):
        return
    equal = [other for other, weight in weights.items() if same_values(weight, value)]
    yield from (other for other in equal if re.sub(r"\d+", "#", other) == pattern)
    yield from sorted(
        (other for other in equal if _shared_end(name, other)), key=lambda other: -_shared_end(name, other)
    )


def _shared_end(name: str, other: str) -> int:
    """Return how many trailing names two paths share."""
    own, target = name.split("."), other.split(".")
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(own), reversed(target), strict=False))))


def _changed_prefix(name: str, target: str) -> tuple[str, str]:
    """Return the shortest prefixes of both names that differ: ``layers.0`` and ``layers.2``, or "" and ``last``."""
    own, other = name.split("."), target.split(".")
    if len(own) != len(other):
        shared = _shared_end(name, target)
        return ".".join(own[: len(own) - shared]), ".".join(other[: len(other) - shared])
    end = 1 + next(place for place, (left, right) in enumerate(zip(own, other, strict=True)) if left != right)
    return ".".join(own[:end]), ".".join(other[:end])

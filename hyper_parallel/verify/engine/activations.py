"""Placements of outputs, masks and recorded values: read from tensors, declared, or inferred from values.

An output is placed by matching its values within the tolerance. The matched rows also place other values of the same
sizes on that rank, such as wrong values, which match nowhere. The rows of an output are used only if the ranks together
have all its elements: if elements are missing, some rank works on the wrong rows. A value of the reference's shape is a
replica, unless the values of a group of ranks sum to the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.axes import Axes
from hyper_parallel.verify.engine.bounds import Bounds, Key
from hyper_parallel.verify.engine.declared import Declaration
from hyper_parallel.verify.engine.matching import compact, find_part, positions_of, rows_of
from hyper_parallel.verify.engine.placement import (
    Placement,
    declared_placement,
    describe,
    region_placement,
    whole,
)
from hyper_parallel.verify.frameworks.contract.records import Record

__all__ = ["EVALUATION", "ActivationPlacements", "are_padded_rows"]

EVALUATION = " (no_grad)"
"""Suffix that recorders add to the path of a model that is called under ``no_grad``."""

KINDS = ("value", "output", "mask")
_Sizes = tuple[int, int, int]

_MOSTLY = 0.5
"""Share of a shard's elements that must equal the reference's at a position to place the shard there."""


class ActivationPlacements:
    """The placements of outputs, masks and recorded values on every rank.

    Args:
        bounds: tolerances of the reference.
        ranks: each rank's records by key.
        axes: axes of the program's mesh.
        declared: parsed declarations, by kind and name of the value.

    Attributes:
        unplaced: by kind and name, the reason why the placement cannot be determined.
        rows: for each rank, how often each selection of rows was recognised, by dim, local size and global size.
    """

    def __init__(
        self,
        bounds: Bounds,
        ranks: Sequence[Mapping[Key, Record]],
        axes: Axes,
        declared: Mapping[tuple[str, str], Declaration],
    ) -> None:
        self.bounds, self.ranks, self.axes, self.declared = bounds, ranks, axes, declared
        self.unplaced: dict[tuple[str, str], str] = {}
        self.rows: list[dict[_Sizes, Counter[tuple[int, ...]]]] = [{} for _ in ranks]
        self._alike: list[dict[tuple[bool, bool, _Sizes], Counter[tuple[int, ...]]]] = [{} for _ in ranks]
        self._placements: dict[tuple[Key, int], Placement] = {}
        self._possible: dict[tuple[Key, int], Placement] = {}
        keys = [key for key in bounds.reference if key[0] in KINDS]
        later = [key for key in keys if not self._recognise(key)]
        partly = [key for key in keys if key not in later and not self._covers(key)]
        for key in keys:
            if key not in partly:
                self._vote(key)
        for key in partly:
            self._place_again(key)
        self._vote_possibly()
        for key in later:
            self._place_rest(key)

    def of(self, key: Key, rank: int) -> Placement | None:
        """Return the placement of a value on a rank; None if it is missing or its placement cannot be determined."""
        return self._placements.get((key, rank))

    def by_rows(self, rank: int, shape: tuple[int, ...], total: tuple[int, ...]) -> Placement | None:
        """Return the placement of a value of these sizes, from the rows of recognised outputs; None if unknown."""
        if shape == total:
            return whole(total)
        if len(shape) != len(total):
            return None
        rows = []
        for dim, (size, whole_size) in enumerate(zip(shape, total, strict=True)):
            votes = self.rows[rank].get((dim, size, whole_size))
            if size != whole_size and not votes:
                return None
            rows.append(np.array(votes.most_common(1)[0][0]) if size != whole_size and votes else np.arange(size))
        positions = positions_of(tuple(rows), total)
        return Placement(total, positions, words=describe(positions, total))

    def other_rows(self) -> dict[Key, list[int]]:
        """Return values whose rows on a rank are not those of earlier values; the program may restore the order later.

        Rows may differ between steps and calls: a rank may split its shard of a batch over several calls.
        """
        first: dict[tuple[int, ...], tuple[int, ...]] = {}
        other: dict[Key, list[int]] = {}
        for key, rank in ((key, rank) for key in self.bounds.reference for rank in range(len(self.ranks))):
            placement = self._placements.get((key, rank))
            rows = (
                None
                if placement is None or placement.positions is None
                else rows_of(placement.positions, placement.shape)
            )
            for dim, (line, total) in enumerate(zip(rows or (), placement.shape if placement else (), strict=False)):
                own = tuple(int(row) for row in line)
                if line.size != total and first.setdefault((*key[2:], rank, dim, line.size, total), own) != own:
                    other.setdefault(key, []).append(rank)
        return other

    def _recognise(self, key: Key) -> bool:
        """Place a value by its tensors, a declaration or its numbers; return whether it was placed on every rank."""
        reference = np.asarray(self.bounds.reference[key].value)
        records = {rank: index[key] for rank, index in enumerate(self.ranks) if key in index}
        shapes = {rank: np.shape(record.value) for rank, record in records.items()}
        declaration = self.declared.get(key[:2])
        for rank, record in records.items():
            placement = None
            if declaration is not None:
                placement = declared_placement(declaration, rank, shapes, reference.shape, self.axes)
            elif record.region is not None and record.region.shape == reference.shape:
                placement = region_placement(record.region, shapes[rank])
            elif not np.size(record.value):
                empty = np.zeros(shapes[rank], dtype=np.int64)
                placement = Placement(reference.shape, empty, words="empty")
            elif shapes[rank] == reference.shape:
                placement = whole(reference.shape) if self._equal(key, record.value) else None
            else:
                placement = self._matched(key, rank, record.value)
            if placement is not None:
                self._placements[key, rank] = placement
        return all((key, rank) in self._placements for rank in records)

    def _matched(self, key: Key, rank: int, value: Any) -> Placement | None:
        reference = np.asarray(self.bounds.reference[key].value)
        if reference.dtype.kind == "b" or np.ndim(value) == 0:
            return None
        match = find_part(value, reference, self.bounds.allowed(key))
        if match is None:
            return None
        words = describe(match.positions, reference.shape)
        placement = Placement(reference.shape, compact(match.positions, reference.shape), words=words)
        if not match.unique:
            self._possible[key, rank] = placement
        return placement if match.unique else None

    def _covers(self, key: Key) -> bool:
        """Return whether the ranks together have every element, not counting padding (:func:`are_padded_rows`)."""
        covered = np.zeros(np.size(self.bounds.reference[key].value), dtype=bool)
        placements = [self._placements[key, rank] for rank, index in enumerate(self.ranks) if key in index]
        for placement in placements:
            placement.mark(covered)
        return bool(covered.all()) or not placements or are_padded_rows(placements)

    def _vote(self, key: Key) -> None:
        """Count the rows of each rank for a value whose shards were recognised."""
        for rank in range(len(self.ranks)):
            for sizes, own in _sharded_rows(self._placements.get((key, rank))):
                self.rows[rank].setdefault(sizes, Counter())[own] += 1
                self._alike[rank].setdefault((EVALUATION in key[1], True, sizes), Counter())[own] += 1

    def _vote_possibly(self) -> None:
        """Count the rows of values that match several positions."""
        for (key, rank), placement in self._possible.items():
            for sizes, own in _sharded_rows(placement):
                self._alike[rank].setdefault((EVALUATION in key[1], False, sizes), Counter())[own] += 1

    def _place_again(self, key: Key) -> None:
        """If elements of a value are on no rank, place it by the rows of other values instead."""
        shapes = {rank: np.shape(index[key].value) for rank, index in enumerate(self.ranks) if key in index}
        likely = {rank: self._likely(key, rank, shape, trusted=False) for rank, shape in shapes.items()}
        for rank, placement in likely.items():
            declared = key[:2] in self.declared or self.ranks[rank][key].region is not None
            if placement is not None and not declared and all(likely.values()):
                self._placements[key, rank] = placement

    def _place_rest(self, key: Key) -> None:
        """Place the remaining values: pending sums, rows known from other outputs, replicas with wrong values."""
        records = {rank: index[key] for rank, index in enumerate(self.ranks) if key in index}
        rest = [rank for rank in records if (key, rank) not in self._placements]
        likely = {rank: self._likely(key, rank, np.shape(records[rank].value)) for rank in rest}
        self._place_pending(key, records, likely)
        for rank in rest:
            placement, possible = likely[rank], self._possible.get((key, rank))
            if (key, rank) in self._placements:
                continue
            if possible is not None and (placement is None or not self._equal(key, records[rank].value, placement)):
                placement = possible  # fits several positions
            if placement is not None:
                self._placements[key, rank] = placement
            else:
                shape, total = list(np.shape(records[rank].value)), list(np.shape(self.bounds.reference[key].value))
                self.unplaced.setdefault(key[:2], f"{shape} on rank {rank} matches no part of the reference's {total}")

    def _likely(self, key: Key, rank: int, shape: tuple[int, ...], *, trusted: bool = True) -> Placement | None:
        """Return the placement that the shape and the rows of other outputs suggest; None if they do not.

        Args:
            key: key of the value.
            rank: the rank that has the shard.
            shape: shape of the shard.
            trusted: whether the recognised shards of this value are at their expected positions.
        """
        total = np.shape(self.bounds.reference[key].value)
        if shape == total:
            return whole(total)
        if len(shape) != len(total) or any(map(int.__gt__, shape, total)):
            return None
        rows = []
        for dim, (size, whole_size) in enumerate(zip(shape, total, strict=True)):
            votes = self._votes(key, rank, (dim, size, whole_size))
            in_order = self._in_order(key, dim, rank, trusted=trusted)
            if size == whole_size:
                rows.append(np.arange(size))
            elif votes:
                rows.append(np.array(votes.most_common(1)[0][0]))
            elif in_order is not None:
                rows.append(in_order)
            else:
                return None
        positions = positions_of(tuple(rows), total)
        return Placement(total, positions, words=describe(positions, total))

    def _votes(self, key: Key, rank: int, sizes: _Sizes) -> Counter[tuple[int, ...]] | None:
        """Return how often each selection of rows of these sizes was recognised, or else is possible.

        Values of the same grad mode are preferred: a model that is called under ``no_grad`` in a training step may get
        a different batch.
        """
        alike = (self._alike[rank].get((EVALUATION in key[1], sure, sizes)) for sure in (True, False))
        return next(filter(None, alike), None) or self.rows[rank].get(sizes)

    def _in_order(self, key: Key, dim: int, rank: int, *, trusted: bool) -> Any | None:
        """Return the rank's rows of ``dim`` if the shards of a group are consecutive blocks of the dim.

        With ``trusted``, at least one shard of the group must have been recognised, and every recognised shard must be
        at its position. Otherwise, most elements of all shards must be right at these positions.
        """
        total = np.shape(self.bounds.reference[key].value)[dim]
        for groups in self.axes.groups.values():
            group = next((group for group in groups if rank in group), ())
            if len(group) < 2 or any(key not in self.ranks[other] for other in group):
                continue
            shapes = [np.shape(self.ranks[other][key].value) for other in group]
            sizes = [shape[dim] if dim < len(shape) else -1 for shape in shapes]
            if sum(sizes) != total or not self._same_elsewhere(key, dim, group):
                continue
            starts = np.cumsum([0, *sizes])
            lines = {other: np.arange(starts[n], starts[n] + sizes[n]) for n, other in enumerate(group)}
            if not trusted or self._agree(key, dim, lines):
                return lines[rank]
        return None

    def _same_elsewhere(self, key: Key, dim: int, group: Sequence[int]) -> bool:
        """Return whether ranks of a group have the same rows in the other dims, as far as rows are known."""
        total = np.shape(self.bounds.reference[key].value)
        for other, size in enumerate(total):
            lines = set()
            for rank in group:
                local = np.shape(self.ranks[rank][key].value)
                votes = self.rows[rank].get((other, local[other], size)) if len(local) == len(total) else None
                lines.add(votes.most_common(1)[0][0] if votes else ())
            if other != dim and len(lines) > 1:
                return False
        return True

    def _agree(self, key: Key, dim: int, lines: Mapping[int, Any]) -> bool:
        """Return whether shards of the group were recognised, all of them at the given rows of ``dim``."""
        known = []
        for rank, line in lines.items():
            placement = self._placements.get((key, rank))
            if placement is not None and placement.positions is not None and placement.positions.size:
                rows = rows_of(placement.positions, placement.shape)
                known.append(rows is not None and np.array_equal(rows[dim], line))
        return all(known) if known else self._mostly(key, dim, lines)

    def _mostly(self, key: Key, dim: int, lines: Mapping[int, Any]) -> bool:
        """Return whether most elements of each rank equal the reference's at the given rows, so that few are wrong."""
        reference, allowed = np.asarray(self.bounds.reference[key].value), self.bounds.allowed(key)
        if reference.dtype.kind not in "fc":
            return False
        for rank, line in lines.items():
            own = np.asarray(self.ranks[rank][key].value)
            expected, slack = (np.take(array, line, axis=dim) for array in (reference, allowed))
            if own.shape != expected.shape or not own.size:
                return False
            with np.errstate(invalid="ignore"):
                if float(((np.abs(own - expected) <= slack) | (own == expected)).mean()) < _MOSTLY:
                    return False
        return True

    def _place_pending(self, key: Key, records: Mapping[int, Record], likely: Mapping[int, Placement | None]) -> None:
        """Place pending sums: values of ranks with the same shard that add up to the reference's shard."""
        if key[0] != "output" or np.asarray(self.bounds.reference[key].value).dtype.kind not in "fc":
            return
        for axis, groups in self.axes.sets():
            for group in groups:
                members = [likely.get(rank) for rank in group]
                first = members[0]
                if first is None or any(member is None or not first.same_place(member) for member in members):
                    continue
                total = sum(np.asarray(records[rank].value) for rank in group)
                if np.any(total) and self._equal(key, total, first) and not self._has_sum(records, group, total):
                    words = f"{first.words}, pending sum over {axis}"
                    placement = Placement(first.shape, first.positions, (group,), words)
                    self._placements.update({(key, rank): placement for rank in group})

    def _has_sum(self, records: Mapping[int, Record], group: Sequence[int], total: Any) -> bool:
        """Return whether one rank has the complete sum and the others have zeros; this is not a pending sum."""
        return any(np.array_equal(np.asarray(records[rank].value), total) for rank in group)

    def _equal(self, key: Key, value: Any, placement: Placement | None = None) -> bool:
        placement = placement or whole(np.shape(self.bounds.reference[key].value))
        expected, allowed = placement.take(self.bounds.reference[key].value), placement.take(self.bounds.allowed(key))
        value = np.asarray(value)
        if value.dtype.kind == "b" or expected.dtype.kind == "b":
            return bool(np.array_equal(value, expected))
        with np.errstate(invalid="ignore"):
            return bool(((np.abs(value - expected) <= allowed) | (value == expected)).all())


def _sharded_rows(placement: Placement | None) -> Iterator[tuple[_Sizes, tuple[int, ...]]]:
    """Yield each sharded dim with its local and global size, and the rows of the shard."""
    if placement is None or placement.positions is None:
        return
    rows = rows_of(placement.positions, placement.shape)
    for dim, (line, total) in enumerate(zip(rows or (), placement.shape, strict=False)):
        if line.size != total:
            yield (dim, line.size, total), tuple(int(row) for row in line)


def are_padded_rows(placements: Sequence[Placement]) -> bool:
    """Return whether shards have all rows of dim 0 together, and the first or the last elements of each other dim.

    Each rank pads its rows to its own longest row. The single device pads to the longest row of all, which some rank
    has.
    """
    shape = placements[0].shape
    found = [None if each.positions is None else rows_of(each.positions, shape) for each in placements]
    products = [rows for rows in found if rows is not None]
    if len(products) < len(found) or not shape or len(set().union(*(rows[0].tolist() for rows in products))) < shape[0]:
        return False
    for dim, total in enumerate(shape[1:], 1):
        lines = [rows[dim] for rows in products]
        first = all(np.array_equal(line, np.arange(line.size)) for line in lines)
        last = all(np.array_equal(line, np.arange(total - line.size, total)) for line in lines)
        if not (first or last) or max(line.size for line in lines) < total:
            return False
    return True

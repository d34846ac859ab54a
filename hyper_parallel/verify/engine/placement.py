"""Placements of a rank's values in the reference's: from tensors, declarations and initial weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.axes import Axes
from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.declared import Declaration
from hyper_parallel.verify.engine.matching import Box, compact, find_part, positions_of, rows_of
from hyper_parallel.verify.frameworks.contract.records import Record, Region

__all__ = [
    "ParameterPlacements",
    "Placement",
    "declared_placement",
    "describe",
    "fits",
    "piece_placement",
    "ranks_along",
    "region_placement",
    "renamed",
    "renamed_path",
    "whole",
]

_MODEL = "(model)"
_UNNAMED = ("loss", "norm", "rate", "value")
"""Kinds of values whose names are not those of a module or parameter."""


@dataclass(frozen=True)
class Placement:
    """The placement of a rank's value.

    Attributes:
        shape: shape of the global value.
        positions: flat position of each element in the global value, as an array or a :class:`Box`; None if the rank
            has all elements, in order.
        pending: groups of ranks whose local values add up to the global value.
        words: the placement, for reports.
        compared: False if the value is local to the rank.
    """

    shape: tuple[int, ...]
    positions: Any | None = None
    pending: tuple[tuple[int, ...], ...] = ()
    words: str = "replica"
    compared: bool = True

    def take(self, array: Any) -> Any:
        """Return the shard of a global array that the rank should have."""
        array = np.asarray(array)
        if self.positions is None:
            return array
        if isinstance(self.positions, Box):
            return array.reshape(self.positions.total)[self.positions.slices]
        return array.reshape(-1)[self.positions]

    def same_place(self, other: Placement) -> bool:
        """Return whether both placements are the same shard of a value of the same shape."""
        if self.shape != other.shape or self.positions is None or other.positions is None:
            return self.shape == other.shape and self.positions is other.positions
        if isinstance(self.positions, Box) and isinstance(other.positions, Box):
            return self.positions == other.positions
        return np.array_equal(self.positions, other.positions)

    def mark(self, covered: Any) -> None:
        """Set the elements of this shard in a flat array of booleans as long as the global value."""
        if self.positions is None:
            covered[:] = True
        elif isinstance(self.positions, Box):
            covered.reshape(self.positions.total)[self.positions.slices] = True
        else:
            covered[self.positions.reshape(-1)] = True

    def all_positions(self) -> Any:
        """Return the flat positions as an array, also for a complete value."""
        if self.positions is None:
            return np.arange(int(np.prod(self.shape))).reshape(self.shape)
        return np.asarray(self.positions)


def whole(shape: Sequence[int]) -> Placement:
    """Return the placement of a replica."""
    return Placement(tuple(shape))


def region_placement(region: Region, shape: Sequence[int], total: tuple[int, ...] | None = None) -> Placement:
    """Return the placement for a region that a recorder read from a tensor.

    Args:
        region: region of the tensor, or of its flat view.
        shape: shape of the local tensor.
        total: shape of the global value, if the region may be in its flat view.
    """
    total = region.shape if total is None else total
    positions: Any = None if tuple(shape) == total else Box(tuple(region.start), tuple(shape), region.shape)
    if region.spans:
        positions = _elements(region, shape)
    pending = tuple(tuple(entry.ranks) for entry in region.pending)
    words = describe(positions, total)
    if pending:
        words += "".join(f", pending {entry.reduction} over ranks {list(entry.ranks)}" for entry in region.pending)
    return Placement(total, positions, pending, words)


def fits(region: Region | None, total: Sequence[int]) -> bool:
    """Return whether a region is in a value of this shape or in its flat view."""
    return region is not None and region.shape in (tuple(total), (int(np.prod(total)),))


def piece_placement(owner: Placement, local: Sequence[int], region: Region, shape: Sequence[int]) -> Placement | None:
    """Return the placement of a slice of a flattened parameter; None if the region has neither of the two forms.

    Args:
        owner: placement of this rank's shard of the parameter.
        local: shape of that shard.
        region: region of the slice, in the flat view of that shard or of the global parameter.
        shape: shape of the slice.
    """
    if region.shape == (int(np.prod(local)),):
        positions = owner.all_positions().reshape(-1)[_elements(region, shape)]
        positions = compact(positions, owner.shape)
        return Placement(owner.shape, positions, words=describe(positions, owner.shape))
    return region_placement(region, shape, owner.shape) if fits(region, owner.shape) else None


def _elements(region: Region, shape: Sequence[int]) -> Any:
    """Return the positions of a flat region's elements in the flattened value."""
    spans = region.spans or ((region.start[0], int(np.prod(shape))),)
    return np.concatenate([np.arange(start, start + size) for start, size in spans]).reshape(tuple(shape))


def declared_placement(
    declaration: Declaration, rank: int, shapes: Mapping[int, tuple[int, ...]], shape: Sequence[int], axes: Axes
) -> Placement:
    """Return the placement that a declaration describes.

    Args:
        declaration: the parsed declaration.
        rank: the rank that has the value.
        shapes: local shapes by rank.
        shape: shape of the reference's value.
        axes: axes of the program's mesh.

    Raises:
        ValueError: the shards do not make up the reference's value.
    """
    if declaration.local:
        return Placement(tuple(shape), words="local", compared=False)
    rows = [np.arange(size) for size in shape]
    for dim, names in declaration.shards:
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"the declaration {declaration.words!r} does not fit: the value has {len(shape)} dims")
        ranks = ranks_along(axes, names, rank)
        sizes = [shapes[other][dim] if other in shapes else 0 for other in ranks]
        if sum(sizes) != shape[dim]:
            raise ValueError(
                f"the declaration {declaration.words!r} does not fit: ranks {list(ranks)} have {sizes} rows in dim "
                f"{dim}, the reference {shape[dim]}"
            )
        start = sum(sizes[: ranks.index(rank)])
        rows[dim] = np.arange(start, start + shapes[rank][dim])
    positions = positions_of(tuple(rows), tuple(shape)) if declaration.shards else None
    pending = (ranks_along(axes, declaration.pending, rank),) if declaration.pending else ()
    return Placement(tuple(shape), positions, pending, declaration.words)


def describe(positions: Any | None, shape: tuple[int, ...]) -> str:
    """Return a placement in words: ``rows 2:5 of 9 in dim 0``."""
    if positions is None:
        return "replica"
    rows = rows_of(positions, shape)
    if rows is None:
        return f"{positions.size} of {int(np.prod(shape))} elements"
    parts = []
    for dim, (line, size) in enumerate(zip(rows, shape, strict=True)):
        if not np.array_equal(line, np.arange(size)):
            contiguous = np.array_equal(line, np.arange(line[0], line[0] + line.size))
            chosen = (
                f"{line[0]}:{line[0] + line.size}" if contiguous else str(line.tolist() if line.size < 7 else "some")
            )
            parts.append(f"rows {chosen} of {size} in dim {dim}")
    return ", ".join(parts) or "replica"


class ParameterPlacements:
    """The placements of weights and buffers on every rank, inferred from their values before training.

    Args:
        reference: the reference's records by key.
        ranks: each rank's records by key.
        axes: axes of the program's mesh.
        declared: parsed declarations by pattern.

    Attributes:
        unplaced: for each name, the reason why the placement cannot be determined.
        strangers: names and ranks of initial values that are not found in the reference's values.
    """

    KINDS = ("weight", "buffer")

    def __init__(
        self,
        reference: Mapping[Key, Record],
        ranks: Sequence[Mapping[Key, Record]],
        axes: Axes,
        declared: Mapping[tuple[str, str], Declaration],
    ) -> None:
        self.axes, self.declared = axes, declared
        self.unplaced: dict[str, str] = {}
        self.strangers: set[tuple[str, int]] = set()
        self.shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        self._placements: dict[tuple[str, int], Placement] = {}
        self._initial = _first_values(reference.values())
        self._own = [_first_values(index.values()) for index in ranks]
        unsure: list[tuple[str, int]] = []
        for name, record in self._initial.items():
            for rank, own in enumerate(self._own):
                if name in own:
                    self.shapes[name, rank] = np.shape(own[name].value)
                    if not self._place(name, rank, record, own[name]):
                        unsure.append((name, rank))
        for name, rank in unsure:
            self._place_by_others(name, rank)

    def of(self, name: str, rank: int) -> Placement | None:
        """Return the placement of a parameter or buffer on a rank; None if it is missing or cannot be determined."""
        return self._placements.get((name, rank))

    def owner(self, name: str) -> str:
        """Return the parameter of a gradient or state (``wq.weight:exp_avg``); empty if there is none."""
        name = name.partition(":")[0]
        while name and name not in self._initial:
            name = name.rpartition(".")[0]
        return name

    def names(self) -> list[str]:
        """Return all names of weights and buffers in the reference, in their order."""
        return list(self._initial)

    def missing(self, name: str) -> Any:
        """Return the flat positions of a parameter's elements that no rank has; empty if a placement is unknown."""
        holders = [rank for rank, own in enumerate(self._own) if name in own]
        placements = [self._placements.get((name, rank)) for rank in holders]
        covered = np.zeros(int(np.prod(np.shape(self._initial[name].value))), dtype=bool)
        for placement in placements:
            if placement is None:
                return np.flatnonzero([])
            placement.mark(covered)
        return np.flatnonzero(~covered) if holders else np.flatnonzero([])

    def _place(self, name: str, rank: int, reference: Record, own: Record) -> bool:
        """Place one value; return False if its numbers match several positions."""
        expected, value = np.asarray(reference.value), np.asarray(own.value)
        declaration = self.declared.get((reference.kind, name))
        if declaration is not None:
            shapes = {other: shape for (known, other), shape in self._all_shapes(name).items() if known == name}
            placement = declared_placement(declaration, rank, shapes, expected.shape, self.axes)
        elif own.region is not None and fits(own.region, expected.shape):
            placement = region_placement(own.region, value.shape, expected.shape)
        elif value.shape == expected.shape:
            placement = whole(expected.shape)
        elif not value.size:
            empty = np.zeros(value.shape, dtype=np.int64)
            placement = Placement(expected.shape, empty, words="empty")
        else:
            match = find_part(value, expected) if reference.step == own.step == -1 else None
            if match is None and reference.step == own.step == -1:
                self.strangers.add((name, rank))
                return True
            if match is None or not match.unique:
                return False
            words = describe(match.positions, expected.shape)
            placement = Placement(expected.shape, compact(match.positions, expected.shape), words=words)
        self._placements[name, rank] = placement
        return True

    def _all_shapes(self, name: str) -> dict[tuple[str, int], tuple[int, ...]]:
        return {(name, rank): np.shape(own[name].value) for rank, own in enumerate(self._own) if name in own}

    def _place_by_others(self, name: str, rank: int) -> None:
        """Place a parameter that matches several positions like other parameters of its module, or of any module."""
        expected, local = np.shape(self._initial[name].value), self.shapes[name, rank]
        module = name.rpartition(".")[0]
        known = [other for other in self._initial if (other, rank) in self._placements and other != name]
        near = [other for other in known if other.rpartition(".")[0] == module]
        for names in (near, known):
            positions = self._like(names, rank, local, expected)
            if positions is not None:
                words = describe(positions, expected)
                self._placements[name, rank] = Placement(expected, positions, words=words)
                return
        self.unplaced.setdefault(
            name,
            f"its values before training fit several places on rank {rank} (local {list(local)} of {list(expected)})",
        )

    def _like(self, names: Iterable[str], rank: int, local: tuple[int, ...], shape: tuple[int, ...]) -> Any | None:
        """Return positions of a shard ``local`` of ``shape``, from the rows that all ``names`` of these sizes share."""
        if len(local) != len(shape):
            return None
        rows: list[Any] = []
        for size, total in zip(local, shape, strict=True):
            if size == total:
                rows.append(np.arange(total))
                continue
            lines = [line for name in names for line in self._lines(name, rank, size, total)]
            if not lines or any(not np.array_equal(line, lines[0]) for line in lines):
                return None
            rows.append(lines[0])
        return positions_of(tuple(rows), shape)

    def _lines(self, name: str, rank: int, size: int, total: int) -> list[Any]:
        placement = self._placements[name, rank]
        if placement.positions is None or placement.positions.ndim != len(placement.shape):
            return []
        rows = rows_of(placement.positions, placement.shape) or ()
        return [line for line, whole_size in zip(rows, placement.shape, strict=False)
                if (line.size, whole_size) == (size, total)]  # fmt: skip


def renamed(record: Record, modules: Mapping[str, str]) -> Record:
    """Return the record with the reference's names; ``modules`` maps the rank's paths to the reference's paths."""
    if not modules or record.kind in _UNNAMED:
        return record
    of_module = record.kind in {"output", "mask"}
    if record.name.startswith(_MODEL):
        path, rest = "", record.name.removeprefix(_MODEL)
    elif of_module and record.module and record.name.startswith(record.module):
        path, rest = record.module, record.name[len(record.module) :]
    else:
        path = record.name.partition(" (")[0].partition(":")[0]
        rest = record.name[len(path) :]
    other = renamed_path(path, modules)
    owned = not of_module and path.rpartition(".")[0] == record.module
    module = other.rpartition(".")[0] if owned else renamed_path(record.module, modules)
    name = f"{other or (_MODEL if of_module else path)}{rest}"
    return record if (name, module) == (record.name, record.module) else replace(record, name=name, module=module)


def renamed_path(path: str, modules: Mapping[str, str]) -> str:
    """Return the reference's name of a rank's path; ``modules`` maps the rank's paths to the reference's paths."""
    prefix = path
    while prefix:
        if prefix in modules:
            return (modules[prefix] + path[len(prefix) :]).removeprefix(".")
        prefix = prefix.rpartition(".")[0]
    return ".".join(filter(None, (modules[""], path))) if "" in modules else path


def _first_values(records: Iterable[Record]) -> dict[str, Record]:
    """Return the first record of each weight and buffer, which is that before training if there is one."""
    first: dict[str, Record] = {}
    for record in records:
        if record.kind in ParameterPlacements.KINDS:
            first.setdefault(record.name, record)
    return first


def ranks_along(axes: Axes, names: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the ranks that lie along axes through ``rank``, in order; the first axis varies slowest."""
    ranks: tuple[int, ...] = (rank,)
    for name in reversed(names):
        ranks = tuple(dict.fromkeys(other for near in ranks for other in axes.group_of(name, near)))
    return tuple(sorted(ranks)) if len(names) > 1 else ranks

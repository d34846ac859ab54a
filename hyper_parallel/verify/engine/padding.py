"""Rows that only the ranks have: for example, a vocabulary that is padded to a multiple of the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.axes import Axes
from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.matching import find_part
from hyper_parallel.verify.engine.store import first_rows, is_constant
from hyper_parallel.verify.frameworks.contract.records import Record

__all__ = ["without_padding"]

_PARAMETERS = ("weight", "gradient", "state", "saved")
_ACTIVATIONS = ("output", "mask", "value")


@dataclass(frozen=True)
class _Padding:
    """The padding of a group of ranks that have consecutive shards of one parameter.

    Attributes:
        name: name of the parameter.
        group: the ranks, in order.
        dim: the padded dim.
        sizes: sizes of the ranks' shards, by rank.
        total: size of the dim in the reference.
    """

    name: str
    group: tuple[int, ...]
    dim: int
    sizes: Mapping[int, int]
    total: int

    def kept(self, rank: int) -> int:
        """Return how many rows of a rank are also in the reference."""
        before = sum(self.sizes[other] for other in self.group[: self.group.index(rank)])
        return min(max(self.total - before, 0), self.sizes[rank])

    def words(self) -> str:
        """Return a description of the rows that are not compared."""
        rows = {rank: self.sizes[rank] - self.kept(rank) for rank in self.group}
        parts = [f"{count} on rank {rank}" for rank, count in rows.items() if count]
        return (
            f"the last rows of dim {self.dim} of {self.name}, {', '.join(parts)}: the single device has "
            f"{self.total} rows, the ranks {sum(self.sizes.values())}"
        )


def without_padding(
    reference: Mapping[Key, Record], ranks: Sequence[Mapping[Key, Record]], axes: Axes
) -> tuple[list[dict[Key, Record]], list[str], set[tuple[str, int]]]:
    """Return the ranks' records without rows of padding, descriptions of the padding, and nonzero gradients of it.

    Rows are padding if the concatenated shards of a group of ranks begin with the reference's parameter before training
    and are longer. The same rows are removed from gradients, states and outputs of those sizes. Gradients of padding
    are returned as parameter names and steps.

    Args:
        reference: the reference's records by key.
        ranks: each rank's records by key.
        axes: axes of the program's mesh.
    """
    groups: list[tuple[int, ...]] = [(rank,) for rank in range(len(ranks))]
    groups += [tuple(group) for sets in axes.groups.values() for group in sets if len(group) > 1]
    found: dict[tuple[str, int], _Padding] = {}
    for key, record in reference.items():
        if key[0] == "weight" and key[2] == -1:
            for group in groups:
                padding = _padding_of(key, record.value, group, ranks)
                if padding is not None:
                    found.update({(key[1], rank): padding for rank in group})
    trimmed = [
        {key: _trimmed(record, rank, reference.get(key), found, ranks) for key, record in index.items()}
        if any(other == rank for _, other in found) else dict(index)
        for rank, index in enumerate(ranks)
    ]  # fmt: skip
    nonzero = {
        (key[1], key[2])
        for rank, index in enumerate(trimmed)
        for key, record in index.items()
        if key[0] == "gradient" and record.value is not ranks[rank][key].value and _beyond(ranks[rank][key], record)
    }
    return trimmed, list(dict.fromkeys(padding.words() for padding in found.values())), nonzero


def _beyond(record: Record, trimmed: Record) -> bool:
    """Return whether the removed rows of a rank have a nonzero number."""
    own = np.asarray(record.value)
    kept = tuple(slice(size) for size in np.shape(trimmed.value))
    return bool(np.count_nonzero(own) > np.count_nonzero(own[kept]))


def _padding_of(key: Key, value: Any, group: tuple[int, ...], ranks: Sequence[Mapping[Key, Record]]) -> _Padding | None:
    if any(key not in ranks[rank] for rank in group) or is_constant(value):
        return None
    total = np.shape(value)
    shapes = [np.shape(ranks[rank][key].value) for rank in group]
    if any(len(shape) != len(total) for shape in shapes):
        return None
    for dim, size in enumerate(total):
        others = [shape[:dim] + shape[dim + 1 :] for shape in shapes]
        if sum(shape[dim] for shape in shapes) <= size or any(
            other != total[:dim] + total[dim + 1 :] for other in others
        ):
            continue
        if len(group) > 1 and any(shape[dim] >= size for shape in shapes):
            continue  # replicas
        joined = np.concatenate([np.asarray(ranks[rank][key].value) for rank in group], axis=dim)
        if np.array_equal(np.take(joined, np.arange(size), axis=dim), np.asarray(value)):
            sizes = {rank: shape[dim] for rank, shape in zip(group, shapes, strict=True)}
            padding = _Padding(key[1], group, dim, sizes, size)
            padded = [rank for rank in group if padding.kept(rank) < sizes[rank]]
            if not any(_lies_in(np.asarray(ranks[rank][key].value), value) for rank in padded):
                return padding
    return None


def _lies_in(part: Any, value: Any) -> bool:
    """Return whether a shard is found at distinct positions of the reference's value; zeros may share a position."""
    match = find_part(part, value)
    return match is not None and np.unique(match.positions).size == match.positions.size


def _trimmed(
    record: Record,
    rank: int,
    reference: Record | None,
    found: Mapping[tuple[str, int], _Padding],
    ranks: Sequence[Mapping[Key, Record]],
) -> Record:
    """Return a record without its rows of padding."""
    if record.kind in _PARAMETERS:
        own = next(
            (padding for (name, other), padding in found.items() if other == rank and _is_of(record.name, name)), None
        )
        pads = [] if own is None else [own]
    elif record.kind in _ACTIVATIONS and reference is not None:
        pads = [padding for (_, other), padding in found.items() if other == rank]
    else:
        return record
    for padding in pads:
        shape = np.shape(record.value)
        dims = [padding.dim] if record.kind in _PARAMETERS else range(len(shape))
        for dim in dims:
            if len(shape) <= dim or shape[dim] != padding.sizes[rank] or padding.kept(rank) == shape[dim]:
                continue
            if record.kind in _ACTIVATIONS and not _is_padded(record, reference, dim, padding, ranks):
                continue
            return replace(record, value=first_rows(record.value, dim, padding.kept(rank)), region=None)
    return record


def _is_of(name: str, parameter: str) -> bool:
    """Return whether a gradient, state or saved value belongs to a parameter."""
    own = name.partition(":")[0]
    return own == parameter or own.endswith(f".{parameter}")


def _is_padded(
    record: Record, reference: Record | None, dim: int, padding: _Padding, ranks: Sequence[Mapping[Key, Record]]
) -> bool:
    """Return whether the ranks and the reference have as many rows of an output as of the padded parameter."""
    total = () if reference is None else np.shape(reference.value)
    if len(total) != np.ndim(record.value) or total[dim] != padding.total:
        return False
    sizes = [np.shape(ranks[rank][record.key].value) for rank in padding.group if record.key in ranks[rank]]
    return [size[dim : dim + 1] for size in sizes] == [(padding.sizes[rank],) for rank in padding.group]

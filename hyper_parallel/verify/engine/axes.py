"""The axes of a program's mesh: the groups of ranks along each axis, from the groups that the ranks recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np

from hyper_parallel.verify.frameworks.contract.records import Run

__all__ = ["Axes"]


class Axes:
    """Groups of ranks, by name of the axis.

    Args:
        run: the parallel run.
        mesh: sizes of the axes in the order of the mesh, the last one fastest; empty if not known. Groups that the
            ranks recorded are added.

    Attributes:
        groups: for each axis, all its groups, each with its ranks in order. The last axis has all ranks and is called
            ``world``, unless another axis has all ranks already.

    Raises:
        ValueError: the numbers of ranks of the mesh and of the run differ.
    """

    def __init__(self, run: Run, mesh: Mapping[str, int] | None = None) -> None:
        self.world_size = run.world_size
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        if mesh:
            self._add_mesh(dict(mesh))
        recorded: dict[str, set[tuple[int, ...]]] = {}
        for rank in run.ranks:
            for group in rank.groups:
                recorded.setdefault(group.name, set()).add(tuple(group.ranks))
        for name, groups in recorded.items():
            self._add(name, groups)
        whole = tuple(range(self.world_size))
        if not any(groups == (whole,) for groups in self.groups.values()):
            self.groups["world"] = (whole,)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the group along ``axis`` that contains ``rank``; the rank alone if there is none."""
        return next((group for group in self.groups[axis] if rank in group), (rank,))

    def sizes(self) -> dict[str, int]:
        """Return the size of the largest group of each axis."""
        return {axis: max(map(len, groups)) for axis, groups in self.groups.items()}

    def sets(self) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Yield axes and products of two axes, with their groups of more than one rank; each set of groups once."""
        seen: set[frozenset[tuple[int, ...]]] = set()
        proper = {axis: tuple(group for group in groups if len(group) > 1) for axis, groups in self.groups.items()}
        named = [(axis, groups) for axis, groups in proper.items() if groups]
        for (left, first), (right, second) in combinations(list(named), 2):
            named.append((f"{left} and {right}", _joined(first, second)))
        for axis, groups in named:
            if groups and frozenset(groups) not in seen:
                seen.add(frozenset(groups))
                yield axis, groups

    def _add_mesh(self, mesh: dict[str, int]) -> None:
        shape = tuple(mesh.values())
        if int(np.prod(shape)) != self.world_size:
            sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
            raise ValueError(f"the mesh {sizes} has {int(np.prod(shape))} ranks, the program ran on {self.world_size}")
        ranks = np.arange(self.world_size).reshape(shape)
        for dim, axis in enumerate(mesh):
            lines = np.moveaxis(ranks, dim, -1).reshape(-1, shape[dim])
            self.groups[axis] = tuple(tuple(int(rank) for rank in line) for line in lines)

    def _add(self, name: str, groups: set[tuple[int, ...]]) -> None:
        """Add recorded groups that no axis has yet; overlapping groups of the same name become several axes."""
        known = {group for axis in self.groups.values() for group in axis}
        ordered = tuple(sorted(groups - known))
        if not ordered or max(map(len, ordered)) < 2:
            return
        layers: list[list[tuple[int, ...]]] = []
        for group in ordered:
            layer = next((layer for layer in layers if not any(set(group) & set(other) for other in layer)), None)
            if layer is None:
                layers.append([group])
            else:
                layer.append(group)
        for number, layer in enumerate(layers):
            label = name if not number and name not in self.groups else f"{name}#{number + 1}"
            self.groups[label] = tuple(layer)


def _joined(first: tuple[tuple[int, ...], ...], second: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that are connected by groups of either axis."""
    sets: list[set[int]] = []
    for group in (*first, *second):
        touching = [ranks for ranks in sets if ranks & set(group)]
        sets = [ranks for ranks in sets if ranks not in touching] + [set(group).union(*touching)]
    return tuple(sorted(tuple(sorted(ranks)) for ranks in sets))

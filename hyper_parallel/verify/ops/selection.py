"""Which placements of a sample run on DTensors: every row that has not run yet, and some for which operands move."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.rule import Row, Rule
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.verify.ops.claims import claimed, closed, commute, possible, row_text
from hyper_parallel.verify.ops.reference import Case
from hyper_parallel.verify.ops.shards import allows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.dtensor_check import Places

__all__ = [
    "MESHES",
    "QUICK",
    "USER",
    "Effort",
    "PlacementChooser",
    "features",
    "is_due",
    "offered",
    "offered_by_operands",
]

# On several axes a row comes with itself and with the next one; or first beside rows near it, if both are new.
_USUAL: tuple[tuple[int, bool], ...] = ((0, False), (1, False))
_SPARING = ((1, True), (2, True), (3, True), *_USUAL)


class PlacementChooser:
    """Remembers what an operator's samples have shown.

    Args:
        platform: the framework.
        rule: of the operator; None, or a decomposition, has no rows.
        effort: how much is checked.

    Attributes:
        offered: rows that samples can show, each with the shape of the mesh.
        shown: those that have been.
        covered: whether the rule level checks the rows of the case that was asked for last.
    """

    def __init__(self, platform: Platform, rule: object, effort: Effort) -> None:
        self._platform, self._rule, self._effort = platform, rule, effort
        self.offered: set[tuple[tuple[int, ...], str]] = set()
        self.shown: set[tuple[tuple[int, ...], str]] = set()
        self.covered = False

    def places(self, case: Case, shape: tuple[int, ...], *, again: bool) -> tuple[list[Places], int]:
        """Placements to run on a mesh of ``shape``, and how many of them, from the first on, are the rule's rows.

        Args:
            case: the values.
            shape: of the mesh.
            again: these are the second values of the same sizes.
        """
        rows = list(dict.fromkeys(self._row_places(case, shape, again=again)))
        moved = self._moved_places(case, shape, set(rows)) if self._moves(case, shape) else []
        rows, moved = ([one for one in held if is_due(case, one, shape, again=again)] for held in (rows, moved))
        return [*rows, *moved], len(rows)

    def lacking(self, shape: tuple[int, ...]) -> bool:
        """Whether a row that was claimed on this mesh has not been used on it."""
        return any(mesh == shape for mesh, _ in self.offered - self.shown)

    def _row_places(self, case: Case, shape: tuple[int, ...], *, again: bool) -> Iterator[Places]:
        """Placements in which every row that no sample has shown on this mesh is used."""
        self.covered = False
        found = claimed(self._platform, self._rule, case, shape)
        if found is None:
            return
        problem, strategies = found
        rows = [row for row in dict.fromkeys(strategies.rows) if possible(row, case.filled)]
        self.offered |= {(shape, row_text(row)) for row in rows}
        apart, self.covered = self._effort.apart, bool(closed(strategies, case).outputs)
        for shift, both_new in (_SPARING if apart else _USUAL)[: None if len(shape) > 1 else 1]:
            for position, row in enumerate(rows):
                picked = (row, *(rows[(position + shift) % len(rows)] for _ in shape[1:]))
                fresh = {(shape, row_text(one)) for one in picked} - self.shown
                if not (fresh or (again and not apart)) or (both_new and len(fresh) < len(picked)):
                    continue
                choice = combine(problem.call, strategies, picked, range(len(shape)))
                if choice is None or not commute(picked):
                    continue
                places = tuple(layout.placements for layout in choice.targets)
                if apart and not is_due(case, places, shape, again=again):
                    continue  # the other values of this sample will show it
                self.shown |= fresh
                yield places

    def _moves(self, case: Case, shape: tuple[int, ...]) -> bool:
        """Whether operands of this sample move on this mesh; what has no rows runs in no other way."""
        if not case.first:
            return False
        meshes = self._effort.public_meshes or self._effort.meshes
        return (
            not (self._effort.apart and isinstance(self._rule, Rule)) or shape == meshes[-1 - case.number % len(meshes)]
        )

    def _moved_places(self, case: Case, shape: tuple[int, ...], known: set[Places]) -> list[Places]:
        """Further placements, drawn at random from all there are: operands have to move, or are refused."""
        rng = np.random.default_rng([case.seed, *shape])
        options = [_placements(array, len(shape)) for array in case.filled.arrays]
        total = math.prod(map(len, options))
        wanted = self._effort.moved
        if not isinstance(self._rule, Rule):  # there is no other way to run it
            wanted = 2 * wanted if self._effort.apart else max(6, 4 * wanted)
        if total <= wanted:
            return [one for one in itertools.product(*options) if one not in known]
        found: dict[Places, None] = {}
        for _ in range(4 * wanted):
            one = tuple(held[int(rng.integers(len(held)))] for held in options)
            if one not in known:
                found[one] = None
            if len(found) == wanted:
                break
        return list(found)


def is_due(case: Case, places: Places, shape: tuple[int, ...], *, again: bool) -> bool:
    """Averages that round are shown by real numbers, everything else by integers where there are some."""
    return again == _rounds(places, shape) or not (case.filled.integral or again)


def _rounds(places: Places, shape: tuple[int, ...]) -> bool:
    """True when an average over other than a power of two ranks is among ``places``."""
    return any(
        place == Partial("avg") and size & (size - 1)
        for held in places
        for place, size in zip(held, shape, strict=True)
    )


def _placements(array: Any, axes: int) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(array.ndim))]
    kinds += [Partial(op) for op in PARTIAL_OPS if allows(array, op)]
    found = itertools.product(kinds, repeat=axes)
    return [one for one in found if len({place for place in one if isinstance(place, Partial)}) <= 1]


MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2))


@dataclass(frozen=True)
class Effort:
    """How much is checked.

    Attributes:
        meshes: shapes.
        choices: choices of sizes per sample.
        draws: random splits into summands, of the first choice of sizes.
        both: check the first choice of sizes with integers and with real numbers, not with one of them only.
        rule_level: check claimed rows on plain tensors.
        public: run every row on DTensors.
        public_meshes: on these meshes; None for all.
        apart: the rule level has a process of its own, and ranks are processes: on DTensors a row runs once per mesh,
            on several axes beside another one that has not run yet, and further placements on one mesh per sample,
            or fewer on each where there are no rows; what the rule level checks does not count again.
        moved: how many further placements per sample and mesh go through implicit redistribution.
        seconds: of processor time after which no further choice of sizes is begun.
        reproducers: write programs that show what is wrong.
        missing: number of samples on which to look for placements that are true and not claimed.
    """

    meshes: tuple[tuple[int, ...], ...] = MESHES
    choices: int = 60
    draws: int = 2
    both: bool = True
    rule_level: bool = True
    public: bool = True
    public_meshes: tuple[tuple[int, ...], ...] | None = None
    apart: bool = False
    moved: int = 1
    seconds: float = 30.0
    reproducers: bool = True
    missing: int = 2


QUICK = Effort(
    meshes=((3,), (2, 2)), choices=1, draws=1, both=False, public_meshes=((2,),), moved=0, seconds=10.0, missing=0
)
USER = Effort(choices=2, moved=16, seconds=8.0)


def offered(rows: Iterable[Row]) -> set[str]:
    """What a rule's rows can show: pending reductions, and chunks of unequal size."""
    found: set[str] = set()
    for row in rows:
        if any(isinstance(place, Partial) for place in (*row.inputs, *row.outputs)):
            found.add("partial")
        if _cuts_unevenly(row):
            found.add("uneven")
    return found


def _cuts_unevenly(row: Row) -> bool:
    """A cut dim without the condition that its size divides."""
    bound = {*row.even, *((index, dim) for index, dim, _ in row.sizes)}
    return any(isinstance(place, Shard) and (index, place.dim) not in bound for index, place in enumerate(row.inputs))


def offered_by_operands(arrays: Sequence[Any]) -> set[str]:
    """The same where no rows say it: placements of the operands."""
    found: set[str] = set()
    if any(array.ndim for array in arrays):
        found.add("uneven")
    if any(allows(array, op) for array in arrays for op in PARTIAL_OPS):
        found.add("partial")
    return found


def features(mesh: tuple[int, ...], layouts: Sequence[Layout]) -> Iterator[str]:
    """The columns that a check with operands and results of these layouts belongs to."""
    if len(mesh) > 1:
        yield "several axes"
    yield from dict.fromkeys(feature for layout in layouts for feature in _layout_features(layout))


@lru_cache(maxsize=4096)
def _layout_features(layout: Layout) -> tuple[str, ...]:
    found = ["partial"] if layout.partials else []
    if any(size % layout.shard_count(dim) for dim, size in enumerate(layout.shape or ())):
        found.append("uneven")
    if any(layout.dim_axes) and 0 in layout.local_shape_at(list(coordinates(layout.mesh))[-1]):
        found.append("empty")
    return tuple(found)

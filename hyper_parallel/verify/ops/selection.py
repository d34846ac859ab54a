"""Selects the checks of an operator: their amount, placements to run on DTensors, columns of the coverage matrix."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Placement, Shard
from hyper_parallel.core.shard.rule import Row, Rule
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.verify.checker.choices import placement_tuples, possible_placements
from hyper_parallel.verify.checker.shards import can_be_partial
from hyper_parallel.verify.ops.claims import (
    case_strategies,
    fits_values,
    reductions_commute,
    row_text,
    with_known_outputs,
)
from hyper_parallel.verify.ops.reference import Case

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.checker.checker import Places

__all__ = [
    "MESHES",
    "QUICK",
    "USER",
    "Effort",
    "PlacementChooser",
    "is_due",
    "layout_features",
    "operand_columns",
    "row_columns",
]

MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2))

# Pairs (shift, both_new): on several axes, a row is combined with the row ``shift`` positions later in the rule; with
# ``both_new`` only if both have not run yet.
_COMBINATIONS: tuple[tuple[int, bool], ...] = ((0, False), (1, False))
_COMBINATIONS_SEPARATE = ((1, True), (2, True), (3, True), *_COMBINATIONS)


@dataclass(frozen=True)
class Effort:
    """How much of an operator is checked.

    Attributes:
        meshes: shapes of meshes.
        choices: number of choices of sizes per sample.
        splits: number of random splits into partial values, for the first choice of sizes.
        both_values: check the first choice of sizes both with integers and with real numbers, not only with one kind.
        rule_level: check claimed rows on plain tensors.
        public: run every row on DTensors.
        public_meshes: meshes on which rows run on DTensors; None for all.
        separate: the rule level runs in a different process, and ranks are processes, so that checks on DTensors cost
            more. On DTensors each row then runs once per mesh; on several axes, rows that have not run yet are
            combined. Placements that are not rows run on one mesh per sample; if the operator has no rows, fewer run,
            but on every mesh. Checks that the rule level makes too are not counted again.
        redistributed: number of placements per sample and mesh that are not rows, so that operands are redistributed.
        seconds: processor time after which no further choice of sizes is started.
        reproducers: whether to write programs that reproduce failures.
        missing: number of samples to search for valid placements that are not claimed.
        seed: seed of all values.
        device: device that references and ranks compute on.
    """

    meshes: tuple[tuple[int, ...], ...] = MESHES
    choices: int = 60
    splits: int = 2
    both_values: bool = True
    rule_level: bool = True
    public: bool = True
    public_meshes: tuple[tuple[int, ...], ...] | None = None
    separate: bool = False
    redistributed: int = 1
    seconds: float = 30.0
    reproducers: bool = True
    missing: int = 2
    seed: int = 0
    device: str = "cpu"


QUICK = Effort(
    meshes=((3,), (2, 2)), choices=1, splits=1, both_values=False, public_meshes=((2,),), redistributed=0,
    seconds=10.0, missing=0,
)  # fmt: skip
USER = Effort(choices=2, redistributed=16, seconds=8.0)


# -- placements that run on DTensors -----------------------------------------------------------------------------------


class PlacementChooser:
    """Chooses placements that run on DTensors: rows that have not run yet, and placements that need redistribution.

    Args:
        platform: the framework.
        rule: rule of the operator; there are no rows if it is None or a decomposition.
        effort: amount of checking.

    Attributes:
        available: rows that samples can exercise, each with the shape of the mesh.
        shown: rows that have run.
        rule_level_covers: whether the rule level checks the rows of the last case.
    """

    def __init__(self, platform: Platform, rule: object, effort: Effort) -> None:
        self._platform, self._rule, self._effort = platform, rule, effort
        self.available: set[tuple[tuple[int, ...], str]] = set()
        self.shown: set[tuple[tuple[int, ...], str]] = set()
        self.rule_level_covers = False

    def places(self, case: Case, shape: tuple[int, ...], *, again: bool) -> tuple[list[Places], int]:
        """Return placements to run on a mesh of ``shape``, first those of rows, and the number of those of rows.

        Args:
            case: the sample with its values.
            shape: shape of the mesh.
            again: whether these are the second values for the same sizes.
        """
        rows = list(dict.fromkeys(self._row_places(case, shape, again=again)))
        moved = self._redistributed_places(case, shape, set(rows)) if self._redistributes(case, shape) else []
        rows, moved = (
            [places for places in options if is_due(case, places, shape, again=again)] for options in (rows, moved)
        )
        return [*rows, *moved], len(rows)

    def has_unshown(self, shape: tuple[int, ...]) -> bool:
        """Whether a row that was claimed on a mesh of ``shape`` has not run on it."""
        return any(mesh == shape for mesh, _ in self.available - self.shown)

    def _row_places(self, case: Case, shape: tuple[int, ...], *, again: bool) -> Iterator[Places]:
        """Yield placements that use every row that has not run on this mesh."""
        self.rule_level_covers = False
        claimed = case_strategies(self._platform, self._rule, case, shape)
        if claimed is None:
            return
        sample_call, strategies = claimed
        rows = [row for row in dict.fromkeys(strategies.rows) if fits_values(row, case.filled)]
        self.available |= {(shape, row_text(row)) for row in rows}
        separate = self._effort.separate
        self.rule_level_covers = bool(with_known_outputs(strategies, case).outputs)
        combinations = _COMBINATIONS_SEPARATE if separate else _COMBINATIONS
        for shift, both_new in combinations[: None if len(shape) > 1 else 1]:
            for position, row in enumerate(rows):
                picked = (row, *(rows[(position + shift) % len(rows)] for _ in shape[1:]))
                new = {(shape, row_text(picked_row)) for picked_row in picked} - self.shown
                if not (new or (again and not separate)) or (both_new and len(new) < len(picked)):
                    continue
                choice = combine(sample_call.call, strategies, picked, range(len(shape)))
                if choice is None or not reductions_commute(picked):
                    continue
                places = tuple(layout.placements for layout in choice.targets)
                if separate and not is_due(case, places, shape, again=again):
                    continue  # the sample's other values (integers or real numbers) run these placements
                self.shown |= new
                yield places

    def _redistributes(self, case: Case, shape: tuple[int, ...]) -> bool:
        """Whether placements that need redistribution run on this mesh; operators without rows have only these."""
        if not case.first:
            return False
        meshes = self._effort.public_meshes or self._effort.meshes
        on_all_meshes = not (self._effort.separate and isinstance(self._rule, Rule))
        return on_all_meshes or shape == meshes[-1 - case.number % len(meshes)]

    def _redistributed_places(self, case: Case, shape: tuple[int, ...], known: set[Places]) -> list[Places]:
        """Return a random choice of placements that are not in ``known``: operands are redistributed or refused."""
        rng = np.random.default_rng([case.seed, *shape])
        options = [_placements(array, len(shape)) for array in case.filled.arrays]
        total = math.prod(map(len, options))
        count = self._effort.redistributed
        if not isinstance(self._rule, Rule):  # without rows, these are the operator's only placements
            count = 2 * count if self._effort.separate else max(6, 4 * count)
        if total <= count:
            return [places for places in itertools.product(*options) if places not in known]
        chosen: dict[Places, None] = {}
        for _ in range(4 * count):
            places = tuple(placements[int(rng.integers(len(placements)))] for placements in options)
            if places not in known:
                chosen[places] = None
            if len(chosen) == count:
                break
        return list(chosen)


def is_due(case: Case, places: Places, shape: tuple[int, ...], *, again: bool) -> bool:
    """Whether ``places`` run on the values of this case.

    Averages that round run on real numbers, the second values; all other placements run on integers if there are any.
    """
    return again == _rounds(places, shape) or not (case.filled.integral or again)


def _rounds(places: Places, shape: tuple[int, ...]) -> bool:
    """Whether ``places`` contain an average over a number of ranks that is not a power of two."""
    return any(
        placement == Partial("avg") and size & (size - 1)
        for placements in places
        for placement, size in zip(placements, shape, strict=True)
    )


def _placements(array: Any, axes: int) -> list[tuple[Placement, ...]]:
    return placement_tuples(possible_placements(array, PARTIAL_OPS), axes)


# -- columns of the coverage matrix ------------------------------------------------------------------------------------


def row_columns(rows: Iterable[Row]) -> set[str]:
    """Return the columns that checks of a rule's rows can cover: ``partial``, and ``uneven`` for unequal shards."""
    columns: set[str] = set()
    for row in rows:
        if any(isinstance(placement, Partial) for placement in (*row.inputs, *row.outputs)):
            columns.add("partial")
        if _can_be_uneven(row):
            columns.add("uneven")
    return columns


def _can_be_uneven(row: Row) -> bool:
    """Whether no condition requires the size of a sharded dim to be divisible."""
    bound = {*row.even, *((index, dim) for index, dim, _ in row.sizes)}
    return any(
        isinstance(placement, Shard) and (index, placement.dim) not in bound
        for index, placement in enumerate(row.inputs)
    )


def operand_columns(arrays: Sequence[Any]) -> set[str]:
    """Return the columns that checks of an operator without rows can cover."""
    columns: set[str] = set()
    if any(array.ndim for array in arrays):
        columns.add("uneven")
    if any(can_be_partial(array, op) for array in arrays for op in PARTIAL_OPS):
        columns.add("partial")
    return columns


def layout_features(mesh: tuple[int, ...], layouts: Sequence[Layout]) -> Iterator[str]:
    """Yield the columns to which a check with operands and results of these layouts belongs."""
    if len(mesh) > 1:
        yield "several axes"
    yield from dict.fromkeys(feature for layout in layouts for feature in _features(layout))


@lru_cache(maxsize=4096)
def _features(layout: Layout) -> tuple[str, ...]:
    features = ["partial"] if layout.partials else []
    if any(size % layout.shard_count(dim) for dim, size in enumerate(layout.shape or ())):
        features.append("uneven")
    if any(layout.dim_axes) and 0 in layout.local_shape_at(list(coordinates(layout.mesh))[-1]):
        features.append("empty")
    return tuple(features)

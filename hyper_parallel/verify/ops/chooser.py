"""Which placements of a sample run on DTensors: every row that has not run yet, and some for which operands move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.strategy import combine
from hyper_parallel.verify.ops.cases import Case, claimed, closed
from hyper_parallel.verify.ops.effort import Effort
from hyper_parallel.verify.ops.pieces import allows
from hyper_parallel.verify.ops.public import Places
from hyper_parallel.verify.ops.rows import commute, possible, row_text

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Chooser", "is_due"]

# On several axes a row comes with itself and with the next one; or first beside rows near it, if both are new.
_USUAL: tuple[tuple[int, bool], ...] = ((0, False), (1, False))
_SPARING = ((1, True), (2, True), (3, True), *_USUAL)


class Chooser:
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

"""What every rank holds of a global array under a layout, and whether pieces are what they must be.

Summands are drawn at random per element and rank: of both signs, with zeros of both signs; losers of a maximum lie on
both sides of zero, and several ranks may hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.transition import dual

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.boxes import Coordinate
    from hyper_parallel.core.dtensor.layout import Layout

__all__ = [
    "allows",
    "box_of",
    "cut",
    "groups",
    "held",
    "joined",
    "pending",
    "reduced",
    "shares",
    "steps_at",
    "summands",
]

REDUCE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "all": np.logical_and,
    "any": np.logical_or,
}
NUMBERS = {"sum": "fciu", "avg": "fc", "max": "fiu", "min": "fiu", "prod": "fciu", "all": "b", "any": "b"}


def allows(array: Any, op: str) -> bool:
    """Whether these values can be held as summands of ``op``: nobody attains what is no number, and no sum is -0."""
    if array.dtype.kind not in NUMBERS[op]:
        return False
    if array.dtype.kind != "f":
        return True
    if op in {"sum", "avg"}:
        return not (np.signbit(array) & (array == 0)).any()
    return op not in {"max", "min"} or not np.isnan(array).any()


def box_of(array: Any, layout: Layout, at: Coordinate) -> Any:
    """The rank's box of a global array."""
    return array[tuple(slice(start, stop) for start, stop in layout.box_at(at))]


def held(array: Any, layout: Layout, rng: Any, *, integral: bool) -> list[Any]:
    """Per rank, row-major, its piece of ``array``."""
    parts = summands(array, pending(layout), rng, integral=integral)
    return [np.array(box_of(parts[steps_at(layout, at)], layout, at), order="C") for at in coordinates(layout.mesh)]


def pending(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Per axis with a pending reduction, its kind and the number of ranks."""
    return tuple((op, layout.mesh.shape[axis]) for axis, op in layout.partials)


def steps_at(layout: Layout, at: Coordinate) -> Coordinate:
    """Which of the summands the rank at ``at`` holds: its steps along the axes with a pending reduction."""
    return tuple(at[axis] for axis, _ in layout.partials)


def summands(array: Any, kinds: Sequence[tuple[str, int]], rng: Any, *, integral: bool) -> dict[Coordinate, Any]:
    """Global arrays that reduce to ``array``, one axis after another, by the steps along these axes."""
    # Which of several tied ranks gets how much depends on the order in which axes are reduced: ties on one axis only.
    ties = len(kinds) == 1
    found: dict[Coordinate, Any] = {(): array}
    for op, count in kinds:
        found = {
            (*at, step): one
            for at, value in found.items()
            for step, one in enumerate(cut(value, op, count, rng, integral=integral, ties=ties))
        }
    return found


def cut(array: Any, op: str, count: int, rng: Any, *, integral: bool, ties: bool = True) -> list[Any]:
    """``count`` arrays whose reduction by ``op`` is ``array``."""
    if op in {"sum", "avg"}:
        noise = [_noise(array, rng, integral=integral) for _ in range(count - 1)]
        total = array * count if op == "avg" else array
        # The first part has no negative zero, so no sum is one either.
        return [total - sum(noise, np.zeros_like(array)) + 0, *(_signed_zeros(one, rng) for one in noise)]
    if op in {"max", "min"}:
        return _extremes(array, op, count, rng, integral=integral, ties=ties)
    if op == "prod":
        factors = [rng.choice(np.array([-1, 1] if array.dtype.kind in "iu" else [-2, -1, -0.5, 0.5, 1, 2]), array.shape)
                   .astype(array.dtype) for _ in range(count - 1)]  # fmt: skip
        return [array / reduce(np.multiply, factors) if factors and array.dtype.kind in "fc" else
                reduce(np.multiply, factors, array), *factors]  # fmt: skip
    other = rng.integers(0, 2, (count, *array.shape)).astype(bool)
    winner = np.asarray(rng.integers(0, count, array.shape)) == np.arange(count).reshape(-1, *(1 for _ in array.shape))
    # Of all, one rank at least says no where the value is no; of any, one says yes where it is yes.
    return list((array | (other & ~winner)) if op == "all" else (array & (other | winner)))


def _noise(array: Any, rng: Any, *, integral: bool) -> Any:
    if integral or array.dtype.kind not in "fc":
        return rng.integers(-4, 5, array.shape).astype(array.dtype)
    scale = 1.0 + np.where(np.isfinite(array), np.abs(array), 0.0)
    return np.asarray(rng.standard_normal(array.shape) * scale).astype(array.dtype)


def _signed_zeros(array: Any, rng: Any) -> Any:
    if array.dtype.kind != "f":
        return array
    return np.where((array == 0) & (rng.integers(0, 2, array.shape) == 1), array.dtype.type(-0.0), array)


def _extremes(array: Any, op: str, count: int, rng: Any, *, integral: bool, ties: bool) -> list[Any]:
    """Losers lie on the other side, by up to eight units; now and then a loser of integers ties."""
    winner = rng.integers(0, count, array.shape)
    found = []
    for rank in range(count):
        gap = rng.integers(1 - ties, 9, array.shape) if integral else np.abs(rng.standard_normal(array.shape)) * 4
        gap = np.where(winner == rank, 0, gap)
        losing = array - gap if op == "max" else array + gap
        found.append(np.where(gap == 0, array, losing).astype(array.dtype))
    return found


def groups(layout: Layout, axes: Sequence[int]) -> list[tuple[Coordinate, list[int]]]:
    """Ranks that differ along ``axes`` only: the position of the first, and the numbers of all, row-major."""
    found: dict[Coordinate, tuple[Coordinate, list[int]]] = {}
    for number, at in enumerate(coordinates(layout.mesh)):
        rest = tuple(step for axis, step in enumerate(at) if axis not in axes)
        found.setdefault(rest, (at, []))[1].append(number)
    return list(found.values())


def reduced(pieces: Sequence[Any], layout: Layout, partials: Sequence[tuple[int, str]]) -> list[tuple[Coordinate, Any]]:
    """The value that each group of ranks holds together: pending reductions done, the last axis first."""
    kinds = [(op, layout.mesh.shape[axis]) for axis, op in partials]
    together = groups(layout, [axis for axis, _ in partials])
    return [(at, joined([pieces[member] for member in ranks], kinds)) for at, ranks in together]


def joined(parts: Sequence[Any], kinds: Sequence[tuple[str, int]]) -> Any:
    """What the ranks of one group hold together: ``parts`` row-major, a kind and a number of ranks per axis."""
    for op, size in reversed(kinds):
        parts = [_merged(parts[start : start + size], op) for start in range(0, len(parts), size)]
    return parts[0]


def _merged(parts: Sequence[Any], op: str) -> Any:
    value = reduce(REDUCE[op], parts)
    return np.asarray(value / len(parts), parts[0].dtype) if op == "avg" else value


def shares(gradient: Any, layout: Layout, pieces: Sequence[Any]) -> list[Any]:
    """Per rank its share of a gradient: ranks that attain the extremum share it evenly, the others get nothing."""
    local = dual(layout)
    found: list[Any] = [None] * len(pieces)
    for at, together in groups(layout, [axis for axis, _ in layout.partials]):
        stacked = np.stack([pieces[member] for member in together])
        largest = layout.partials[0][1] == "max"
        attained = stacked == (stacked.max(0) if largest else stacked.min(0))
        share = box_of(gradient, local, at) / attained.sum(0)
        for member, mask in zip(together, attained, strict=True):
            found[member] = np.asarray(np.where(mask, share, 0), gradient.dtype)  # nothing, not zero times it
    return found

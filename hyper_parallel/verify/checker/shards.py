"""Computes local shards of a global array in a layout, random partial values, and their reductions.

Partial values are random for each element and rank, with numbers and zeros of both signs. For a maximum, the smaller
values lie on both sides of zero, and several ranks may attain the maximum. Programs that are printed compute their
partial values by formulas instead, which add up exactly in every dtype.
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
    "can_be_partial",
    "extremum_gradients",
    "local_box",
    "local_shard",
    "local_shards",
    "partial_axes",
    "partial_coordinate",
    "partial_values",
    "printable_shard",
    "reduce_group",
    "reduction_groups",
    "split_partial",
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


def can_be_partial(array: Any, op: str) -> bool:
    """Whether ``array`` can be split into partial values: not NaN for an extremum, and not -0 for a sum."""
    if array.dtype.kind not in NUMBERS[op]:
        return False
    if array.dtype.kind != "f":
        return True
    if op in {"sum", "avg"}:
        return not (np.signbit(array) & (array == 0)).any()
    return op not in {"max", "min"} or not np.isnan(array).any()


def local_box(array: Any, layout: Layout, at: Coordinate) -> Any:
    """Return the slice of a global array that belongs to the rank at coordinate ``at``."""
    return array[tuple(slice(start, stop) for start, stop in layout.box_at(at))]


def local_shard(array: Any, layout: Layout, seed: int | Sequence[int], *, integral: bool = False) -> Any:
    """Return the local shard of the rank that ``layout`` belongs to; equal seeds give all ranks consistent partials."""
    at = layout.mesh.coordinate
    assert at is not None
    parts = partial_values(array, partial_axes(layout), np.random.default_rng(seed), integral=integral)
    return np.array(local_box(parts[partial_coordinate(layout, at)], layout, at), order="C")


def local_shards(array: Any, layout: Layout, rng: Any, *, integral: bool) -> list[Any]:
    """Return the local shard of every rank, row-major; partial values are sampled."""
    parts = partial_values(array, partial_axes(layout), rng, integral=integral)
    return [
        np.array(local_box(parts[partial_coordinate(layout, at)], layout, at), order="C")
        for at in coordinates(layout.mesh)
    ]


def partial_axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return the reduction and the number of ranks of every axis with partial values."""
    return tuple((op, layout.mesh.shape[axis]) for axis, op in layout.partials)


def partial_coordinate(layout: Layout, at: Coordinate) -> Coordinate:
    """Return the key for the rank at ``at`` in the result of :func:`partial_values`: its index on each partial axis."""
    return tuple(at[axis] for axis, _ in layout.partials)


def partial_values(array: Any, kinds: Sequence[tuple[str, int]], rng: Any, *, integral: bool) -> dict[Coordinate, Any]:
    """Return global arrays whose reduction, axis by axis, is ``array``; the keys are the indices on these axes."""
    # If ranks on several axes attain an extremum, gradients depend on the order of axes: only one axis has such ties.
    ties = len(kinds) == 1
    parts: dict[Coordinate, Any] = {(): array}
    for op, count in kinds:
        parts = {
            (*at, step): part
            for at, value in parts.items()
            for step, part in enumerate(split_partial(value, op, count, rng, integral=integral, ties=ties))
        }
    return parts


def split_partial(array: Any, op: str, count: int, rng: Any, *, integral: bool, ties: bool = True) -> list[Any]:
    """Return ``count`` random arrays whose reduction by ``op`` is ``array``."""
    if op in {"sum", "avg"}:
        noise = [_noise(array, rng, integral=integral) for _ in range(count - 1)]
        total = array * count if op == "avg" else array
        # A sum is -0 only if all terms are; the first array has no -0.
        first = np.asarray(total - sum(noise, np.zeros_like(array)) + 0).astype(array.dtype)
        return [first, *(_signed_zeros(part, rng) for part in noise)]
    if op in {"max", "min"}:
        return _extremes(array, op, count, rng, integral=integral, ties=ties)
    if op == "prod":
        factors = [rng.choice(np.array([-1, 1] if array.dtype.kind in "iu" else [-2, -1, -0.5, 0.5, 1, 2]), array.shape)
                   .astype(array.dtype) for _ in range(count - 1)]  # fmt: skip
        return [array / reduce(np.multiply, factors) if factors and array.dtype.kind in "fc" else
                reduce(np.multiply, factors, array), *factors]  # fmt: skip
    other = rng.integers(0, 2, (count, *array.shape)).astype(bool)
    winner = np.asarray(rng.integers(0, count, array.shape)) == np.arange(count).reshape(-1, *(1 for _ in array.shape))
    # For `all`, at least one rank has False where the result is False; for `any`, one has True where it is True.
    return list((array | (other & ~winner)) if op == "all" else (array & (other | winner)))


def _noise(array: Any, rng: Any, *, integral: bool) -> Any:
    if integral or array.dtype.kind not in "fc":
        return rng.integers(-4, 5, array.shape).astype(array.dtype)
    finite = np.where(np.isfinite(array), np.abs(array), 0.0)
    scale = min(1.0, float(finite.max(initial=0.0)) or 1.0) + finite  # large noise would round small numbers away
    return np.asarray(rng.standard_normal(array.shape) * scale).astype(array.dtype)


def _signed_zeros(array: Any, rng: Any) -> Any:
    if array.dtype.kind != "f":
        return array
    return np.where((array == 0) & (rng.integers(0, 2, array.shape) == 1), array.dtype.type(-0.0), array)


def _extremes(array: Any, op: str, count: int, rng: Any, *, integral: bool, ties: bool) -> list[Any]:
    """Return arrays one of which attains the extremum at each element; with integers, others may attain it too."""
    winner = rng.integers(0, count, array.shape)
    parts = []
    for rank in range(count):
        gap = rng.integers(1 - ties, 9, array.shape) if integral else np.abs(rng.standard_normal(array.shape)) * 4
        gap = np.where(winner == rank, 0, gap)
        losing = array - gap if op == "max" else array + gap
        parts.append(np.where(gap == 0, array, losing).astype(array.dtype))
    return parts


def reduction_groups(layout: Layout, axes: Sequence[int]) -> list[tuple[Coordinate, list[int]]]:
    """Return the groups of ranks that differ only along ``axes``, each as its first coordinate and its rank numbers."""
    by_rest: dict[Coordinate, tuple[Coordinate, list[int]]] = {}
    for number, at in enumerate(coordinates(layout.mesh)):
        rest = tuple(step for axis, step in enumerate(at) if axis not in axes)
        by_rest.setdefault(rest, (at, []))[1].append(number)
    return list(by_rest.values())


def reduce_group(parts: Sequence[Any], kinds: Sequence[tuple[str, int]]) -> Any:
    """Return the reduction over the ranks of one group, the last axis first.

    Args:
        parts: arrays of the ranks, row-major.
        kinds: reduction and number of ranks per axis.
    """
    for op, size in reversed(kinds):
        parts = [_reduce_axis(parts[start : start + size], op) for start in range(0, len(parts), size)]
    return parts[0]


def _reduce_axis(parts: Sequence[Any], op: str) -> Any:
    value = reduce(REDUCE[op], parts)
    return np.asarray(value / len(parts), parts[0].dtype) if op == "avg" else value


def extremum_gradients(gradient: Any, layout: Layout, shards: Sequence[Any]) -> list[Any]:
    """Return the gradient of every rank: ranks that attain the extremum share it equally, the others get zero."""
    dual_layout = dual(layout)
    gradients: list[Any] = [None] * len(shards)
    for at, ranks in reduction_groups(layout, [axis for axis, _ in layout.partials]):
        stacked = np.stack([shards[rank] for rank in ranks])
        largest = layout.partials[0][1] == "max"
        attained = stacked == (stacked.max(0) if largest else stacked.min(0))
        share = local_box(gradient, dual_layout, at) / attained.sum(0)
        for rank, mask in zip(ranks, attained, strict=True):
            gradients[rank] = np.asarray(np.where(mask, share, 0), gradient.dtype)  # zero times NaN would be NaN
    return gradients


def printable_shard(array: Any, layout: Layout, coordinate: Sequence[int], *, integral: bool) -> Any:
    """Return the local shard of the rank at ``coordinate``; partial values are computed by formulas.

    Args:
        array: the global values.
        layout: layout of the tensor.
        coordinate: coordinate of the rank, one number per axis.
        integral: whether the values are small integers.
    """
    for axis, op in layout.partials:
        array = _printable_part(array, op, layout.mesh.shape[axis], coordinate[axis], integral=integral)
    return np.array(local_box(array, layout, tuple(coordinate)), order="C")


def _printable_part(array: Any, op: str, count: int, step: int, *, integral: bool) -> Any:
    """Return the partial value of rank ``step`` of ``count``; the reduction of all ranks' values is ``array``."""
    places = np.arange(array.size).reshape(array.shape)
    if op in {"any", "all"}:
        mine = (places + step) % count == 0
        return (array & mine) if op == "any" else (array | ~mine)
    if op in {"max", "min"}:
        gap = np.where((places + step) % count == 0, 0, 1 + places % 3)
        return np.asarray(array - gap if op == "max" else array + gap).astype(array.dtype)
    others = range(1, count)
    if op == "avg":
        share = 2 * (step % 2) if step else count - sum(2 * (other % 2) for other in others)
        return np.asarray(array * share).astype(array.dtype)
    if integral or array.dtype.kind == "i":
        pattern = places % 7 - 3
        part = pattern * step if step else array - pattern * sum(others)
        return np.asarray(part).astype(array.dtype)
    share = (2 if step % 2 else -2) if step else 1 - sum(2 if other % 2 else -2 for other in others)
    return np.asarray(array * share).astype(array.dtype)

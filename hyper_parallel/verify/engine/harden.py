"""Builds a case that can show errors out of one that cannot: sizes, weights, cotangents and steps.

Everything here is numbers in, numbers out; who runs the program applies them to the reference and to every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.noise import seed_of

__all__ = ["Repairs", "random_cotangent", "repairs", "shares", "spread_constant", "unequal_sizes", "uneven_rows"]

SPREAD = 0.1
"""Standard deviation of what is added to constant parameters, relative to their value or to 1."""

STEPS = 3
"""Optimizer steps of a case that had one: the first shows stale values, the second drifting replicas."""


@dataclass(frozen=True)
class Repairs:
    """What is changed about a case.

    Attributes:
        mesh: sizes by axis.
        rows: of a batch.
        steps: of the optimizer.
        spread: parameters whose equal values are spread (:func:`spread_constant`).
        weigh_loss: whether outputs are weighted with random numbers (:func:`random_cotangent`).
        words: each change in a sentence.
        left: blind spots that only the user can repair.
    """

    mesh: Mapping[str, int]
    rows: int
    steps: int
    spread: tuple[str, ...] = ()
    weigh_loss: bool = False
    words: list[str] = field(default_factory=list)
    left: list[BlindSpot] = field(default_factory=list)


def repairs(spots: Sequence[BlindSpot], mesh: Mapping[str, int], *, rows: int, steps: int) -> Repairs:
    """Return the changes that let a case show what its blind spots hide.

    Args:
        spots: of the case.
        mesh: its sizes by axis.
        rows: of its batch.
        steps: of its optimizer.
    """
    kinds = {spot.kind for spot in spots}
    words: list[str] = []
    sizes, count, number = dict(mesh), rows, steps
    if "equal-sizes" in kinds:
        sizes = unequal_sizes(mesh)
        words.append(f"the mesh is {_product(sizes)} instead of {_product(mesh)}")
    if "even-dims" in kinds:
        count = uneven_rows(rows, sizes)
        words += [f"the batch has {count} rows instead of {rows}"] if count != rows else []
    if "one-step" in kinds:
        number = max(steps, STEPS)
        words.append(f"{number} steps are made instead of {steps}")
    spread = tuple(spot.subject for spot in spots if spot.kind == "constant-parameters")
    words += [f"{name} gets random values around its own" for name in spread]
    weigh = "constant-cotangents" in kinds
    words += ["the loss weights outputs with random numbers"] if weigh else []
    repaired = {"equal-sizes", "even-dims", "one-step", "constant-parameters", "constant-cotangents"}
    left = [spot for spot in spots if spot.kind not in repaired]
    return Repairs(sizes, count, number, spread, weigh, words, left)


def unequal_sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return a mesh whose axes of more than one rank have different sizes, each at least as large as before.

    The smallest change: axes keep their size in the order in which they come, and the next free size follows.
    """
    sizes: dict[str, int] = {}
    for axis, size in mesh.items():
        free = size
        while size > 1 and free in sizes.values():
            free += 1
        sizes[axis] = free
    return sizes


def uneven_rows(rows: int, mesh: Mapping[str, int]) -> int:
    """Return the least number of rows, ``rows`` or more, that no axis of more than one rank divides."""
    sizes = [size for size in mesh.values() if size > 1]
    candidates = range(rows, rows + 2 * math.prod(sizes) + 2)
    return next((count for count in candidates if all(count % size for size in sizes)), rows)


def random_cotangent(shape: Sequence[int], seed: int, name: str) -> Any:
    """Return random weights of both signs for an output, float64 of ``shape``: equal in every run, of every layout.

    Args:
        shape: of the global output; a rank takes its part of it.
        seed: of the case.
        name: of the output.
    """
    return np.random.default_rng(seed_of(seed, "cotangent", name)).standard_normal(tuple(shape))


def shares(count: int) -> list[float]:
    """Return different factors for the losses of ``count`` ranks that do the same work: positive, of mean 1.

    They are multiples of a power of two, so that their sum is exactly ``count``.
    """
    step = 2.0 ** -math.ceil(math.log2(max(count, 2)))
    return [1.0 + (2 * place - (count - 1)) * step / 2 for place in range(count)]


def spread_constant(array: Any, seed: int, name: str) -> Any:
    """Return a parameter of equal values with random values around it, in its dtype; others as they are.

    Args:
        array: the global parameter; a rank takes its part of the result.
        seed: of the case.
        name: of the parameter.
    """
    array = np.asarray(array)
    if array.dtype.kind != "f" or array.size < 2 or (array != array.flat[0]).any():
        return array
    noise = np.random.default_rng(seed_of(seed, "spread", name)).standard_normal(array.shape)
    return (array + SPREAD * (abs(float(array.flat[0])) or 1.0) * noise).astype(array.dtype)


def _product(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items())

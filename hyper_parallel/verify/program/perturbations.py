"""The perturbed repeats of a reference, which measure the tolerance of each value.

A few repeats run first. If the ranks exceed the resulting tolerances, further repeats follow. A repeat may have two
perturbations: values before the first displaced gradient measure the effect of perturbed inputs and weights, and later
values measure the effect of the displacement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import DISPLACED, ROUNDED, Bounds, Key
from hyper_parallel.verify.engine.movement import MovementKind
from hyper_parallel.verify.engine.noise import displace, perturb, seed_of
from hyper_parallel.verify.engine.sinks import FoldSink

__all__ = ["HALF_PRECISION", "Repeat", "first_repeats", "further_repeats"]

HALF_PRECISION = "half precision"
"""Key of the recorder's note that a module returned numbers of bfloat16 or float16."""

_WORDS: dict[MovementKind, str] = {
    "moved": "inputs and weights in the last place", "rounded": ROUNDED, "displaced": DISPLACED,
}  # fmt: skip


@dataclass
class Repeat:
    """One repeat: its perturbation and the destination of its records.

    Attributes:
        bounds: tolerances of the reference, to which the repeat's measurements are added.
        moved_by: seed and sign of the directions in which inputs and weights move by one ULP; None if they do not.
        rounded_by: the same for half-precision outputs of modules, and for their gradients.
        displaced_by: the same for gradients, which move by their tolerance; with seed None, all move in one direction.
        sink: destination of the repeat's records.
    """

    bounds: Bounds = field(repr=False)
    moved_by: tuple[int, int] | None = None
    rounded_by: tuple[int, int] | None = None
    displaced_by: tuple[int | None, int] | None = None
    sink: FoldSink = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Create the sink."""
        kind: MovementKind = "moved" if self.moved_by else "rounded" if self.rounded_by else "displaced"
        self.sink = FoldSink(self.bounds, kind)

    def computes_exact_norms(self) -> bool:
        """Return whether norms are computed in float64 in this repeat; if so, note in the sink that one was.

        The norm of PyTorch on CPU adds squares sequentially in float32, with an error of 1e-5 for a million elements.
        """
        if self.displaced_by is None:
            return False
        self.sink.exact = True
        return True

    @property
    def words(self) -> str:
        """Description of the perturbation, for reports."""
        return _WORDS[self.sink.kind]

    def perturbed_input(self, name: str, array: Any, dtype: str = "") -> Any:
        """See :class:`~hyper_parallel.verify.frameworks.contract.record_log.Perturbation`."""
        return array if self.moved_by is None else _perturbed(name, array, dtype, *self.moved_by)

    def rounded(self, name: str, array: Any, dtype: str = "") -> Any:
        """See :class:`~hyper_parallel.verify.frameworks.contract.record_log.Perturbation`."""
        return array if self.rounded_by is None else _perturbed(name, array, dtype, *self.rounded_by)

    def perturbed_gradient(self, name: str, step: int, array: Any) -> Any:
        """See :class:`~hyper_parallel.verify.frameworks.contract.record_log.Perturbation`."""
        if self.displaced_by is None:
            return array
        self.sink.displaced.add(name)
        key = self.bounds.last_gradient(name, step)
        if key is None or self.bounds.reference[key].value.shape != array.shape:
            return array
        seed, sign = self.displaced_by
        allowed = self.bounds.allowed(key, ("moved", "rounded"))
        return displace(array, allowed, None if seed is None else seed_of(seed, name), sign)

    def decided(self, key: Key) -> Any | None:
        """See :class:`~hyper_parallel.verify.frameworks.contract.record_log.Perturbation`."""
        record = self.bounds.records.get(key) if key[0] == "choice" else None
        return None if record is None else np.asarray(record.value)


def first_repeats(seed: int, bounds: Bounds, *, half: bool) -> list[Repeat]:
    """Return the repeats of every verification: two, or three for a reference in half precision."""
    directions, gradients = seed_of(seed, "pair", 0), seed_of(seed, "gradients")
    if not half:
        return [
            Repeat(bounds, moved_by=(directions, 1)),
            Repeat(bounds, moved_by=(directions, -1), displaced_by=(gradients, 1)),
        ]
    rounded = seed_of(seed, "half", 0)
    return [
        Repeat(bounds, moved_by=(directions, 1)),
        Repeat(bounds, rounded_by=(rounded, 1)),
        Repeat(bounds, rounded_by=(rounded, -1), displaced_by=(gradients, 1)),
    ]


def further_repeats(seed: int, bounds: Bounds, *, half: bool) -> list[Repeat]:
    """Return the repeats that follow if a value exceeds the tolerances from the first repeats.

    After all repeats, inputs and weights have moved in two antithetic pairs, and so have half-precision outputs.
    Gradients have moved in one pair with random directions per element, and in one pair with the same direction
    everywhere. The opposite of the first displacement comes first, because the first displacement may have moved a
    gradient to about its negative, so that its square did not change.
    """
    gradients = seed_of(seed, "gradients")
    pairs = [(seed_of(seed, "pair", number), sign) for number in (0, 1) for sign in (1, -1)]
    halves = [(seed_of(seed, "half", number), sign) for number in (0, 1) for sign in (1, -1)] if half else []
    return [
        Repeat(bounds, displaced_by=(gradients, -1)),
        *(Repeat(bounds, moved_by=pair) for pair in pairs[1:]),
        *(Repeat(bounds, rounded_by=pair) for pair in halves[1:]),
        *(Repeat(bounds, displaced_by=(way, sign)) for way in (gradients, None) for sign in (1, -1)),
    ]


def _perturbed(name: str, array: Any, dtype: str, seed: int, sign: int) -> Any:
    return perturb(array, seed_of(seed, name), sign, dtype)

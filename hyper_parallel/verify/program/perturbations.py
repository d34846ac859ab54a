"""The changed repeats of a reference, from which the allowed difference of each value is earned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.verify.frameworks.contract.recording import Perturbation
from hyper_parallel.verify.noise import allowed_difference, displace, perturb, seed_of
from hyper_parallel.verify.program.bounds import DISPLACED, ROUNDED
from hyper_parallel.verify.program.records import Run

__all__ = ["HALF_PRECISION", "Displaced", "Moved", "Rounded", "displaced_gradients", "moved_values", "rounded_outputs"]

HALF_PRECISION = "half precision"
"""The note of a recorder that a module returned numbers of bfloat16 or float16."""


class _Unchanged:
    """A perturbation that leaves every value as it is; each kind overrides what it changes."""

    def moved(self, name: str, array: Any, dtype: str = "") -> Any:
        """Return the input or weight as it is."""
        del name, dtype
        return array

    def rounded(self, name: str, array: Any, dtype: str = "") -> Any:
        """Return the output as it is."""
        del name, dtype
        return array

    def displaced(self, name: str, step: int, array: Any) -> Any:
        """Return the gradient as it is."""
        del name, step
        return array


@dataclass(frozen=True)
class Moved(_Unchanged):
    """Inputs and weights moved by a unit in the last place.

    Attributes:
        seed: of the directions.
        sign: 1 or -1; the two signs of one seed are antithetic.
    """

    seed: int
    sign: int
    words = "inputs and weights in the last place"

    def moved(self, name: str, array: Any, dtype: str = "") -> Any:
        """See :class:`Perturbation`."""
        return perturb(array, seed_of(self.seed, name), self.sign, dtype)


@dataclass(frozen=True)
class Rounded(_Unchanged):
    """Outputs of modules in half precision, and their gradients, moved by a unit in the last place.

    Attributes:
        seed: of the directions.
        sign: 1 or -1; the two signs of one seed are antithetic.
    """

    seed: int
    sign: int
    words = ROUNDED

    def rounded(self, name: str, array: Any, dtype: str = "") -> Any:
        """See :class:`Perturbation`."""
        return perturb(array, seed_of(self.seed, name), self.sign, dtype)


@dataclass(frozen=True)
class Displaced(_Unchanged):
    """Gradients moved by all that is allowed to them.

    Attributes:
        seed: of the directions; None moves every element the same way.
        sign: 1 or -1.
        allowed: difference by name and step of the gradient.
    """

    seed: int | None
    sign: int
    allowed: dict[tuple[str, int], Any] = field(repr=False)
    words = DISPLACED

    def displaced(self, name: str, step: int, array: Any) -> Any:
        """See :class:`Perturbation`."""
        allowed = self.allowed.get((name, step))
        if allowed is None:
            return array
        return displace(array, allowed, None if self.seed is None else seed_of(self.seed, name), self.sign)


def moved_values(seed: int) -> Iterator[Perturbation]:
    """Yield two antithetic pairs."""
    for pair in (0, 1):
        for sign in (1, -1):
            yield Moved(seed_of(seed, "pair", pair), sign)


def rounded_outputs(seed: int, reference: Run) -> Iterator[Perturbation]:
    """Yield two antithetic pairs if the reference computes in half precision, else nothing.

    Moving float32 weights and inputs in the last place is lost where they are rounded to half the bits.
    """
    if HALF_PRECISION in reference.ranks[0].notes:
        for pair in (0, 1):
            for sign in (1, -1):
                yield Rounded(seed_of(seed, "half", pair), sign)


def displaced_gradients(seed: int, reference: Run, repeats: Sequence[Run]) -> Iterator[Perturbation]:
    """Yield two antithetic pairs: random directions per element, and one direction everywhere.

    Args:
        seed: of the directions.
        reference: a world of one.
        repeats: of it, perturbed by :func:`moved_values` and :func:`rounded_outputs`.
    """
    gradients = [record for record in reference.ranks[0].records if record.kind == "gradient"]
    moved, rounded = (
        [_gradients(run) for run in repeats if (run.settings.get("perturbation") == ROUNDED) is half]
        for half in (False, True)
    )
    allowed = {
        (key := (gradient.name, gradient.step)): allowed_difference(
            gradient.value,
            [repeat[key] for repeat in moved if key in repeat],
            rounded=[repeat[key] for repeat in rounded if key in repeat],
            dtype=gradient.dtype,
        )
        for gradient in gradients
    }
    for direction in (seed_of(seed, "gradients"), None):
        for sign in (1, -1):
            yield Displaced(direction, sign, allowed)


def _gradients(run: Run) -> dict[tuple[str, int], Any]:
    return {(record.name, record.step): record.value for record in run.ranks[0].records if record.kind == "gradient"}

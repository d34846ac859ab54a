"""Allowed errors of `verify model`: what changes in the last place do to each value of the single-device run.

Rounding makes two correct runs differ, and how far depends on the model: a softmax that cancels, AdamW's division by a
small second moment, or many steps magnify it. So the single-device run is repeated with its inputs, weights, outputs of
modules and gradients changed in the last place, in antithetic pairs (a change and its opposite). A value may differ by
``noise.MULTIPLE`` times the largest change that these repetitions show in its tensor, and at least by as many units of
rounding of the tensor's largest magnitude; ``noise`` derives the multiple.

The bound is one number per tensor: ranks share the repetitions, and exchange a number where they would exchange arrays.
Changing the outputs of modules changes the gradients that come back through them, so a sum of gradients that cancels
(the bias of attention's keys) is moved by the rounding of its terms, and AdamW's step on it is moved with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.verify.compare import magnitude
from hyper_parallel.verify.engine.noise import MULTIPLE, perturb, seed_of, unit

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "PAIRS",
    "Perturbation",
    "allowed_errors",
    "describe",
    "largest_changes",
    "perturb_outputs",
    "perturbations",
]

PAIRS = 2
"""Antithetic pairs of perturbed runs."""

_EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The unit in the last place of 1, by dtype."""

Key = tuple[str, str]
"""Kind and name of a value."""


@dataclass(frozen=True)
class Perturbation:
    """Changes floating values by one unit in the last place; the signs of the changes are random but reproducible.

    Attributes:
        seed: of the signs.
        pair: number of the antithetic pair; its two runs have opposite signs.
        sign: 1 or -1.
    """

    seed: int
    pair: int
    sign: int

    def changed(self, place: str, array: Any) -> Any:
        """Return ``array`` changed in the last place, unless it is not floating; ``place`` names the value."""
        return perturb(array, seed_of(self.seed, self.pair, place), self.sign)

    def changed_tensor(self, platform: Platform, place: str, tensor: Any) -> Any:
        """Return a plain tensor changed in the last place, differentiably."""
        epsilon = _EPSILONS.get(str(tensor.dtype).rpartition(".")[2].lower())
        if epsilon is None:
            return tensor
        directions = (self.changed(place, np.ones(tuple(tensor.shape), np.float32)) > 1) * 2.0 - 1
        wide = "float64" if epsilon < _EPSILONS["float32"] else "float32"
        return tensor * platform.from_numpy((1 + epsilon * directions).astype(wide)).to(tensor.dtype)


def perturbations(seed: int) -> list[Perturbation]:
    """Return the perturbations of all pairs."""
    return [Perturbation(seed, pair, sign) for pair in range(PAIRS) for sign in (1, -1)]


def perturb_outputs(platform: Platform, model: Any, perturbation: Perturbation) -> None:
    """Let every module of ``model`` return its output changed in the last place; its gradient changes as well."""
    calls: dict[str, int] = {}

    def hook_of(path: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            del module, args
            calls[path] = calls.get(path, 0) + 1
            if not platform.is_tensor(output):
                return output
            return perturbation.changed_tensor(platform, f"output of {path}, call {calls[path]}", output)

        return hook

    attached: set[int] = set()
    for path, module in platform.get_cells_and_names(model):
        if id(module) not in attached:
            attached.add(id(module))
            platform.register_forward_hook(module, hook_of(path))


def largest_changes(values: Mapping[Key, Any], repeated: Mapping[Key, Any]) -> dict[Key, float]:
    """Return the largest change of each floating value in a repeated run; infinite where shapes differ."""
    changes: dict[Key, float] = {}
    for key, array in values.items():
        other = repeated.get(key)
        if array is None or array.dtype.kind not in "fc" or not array.size:
            continue
        if other is None or other.shape != array.shape:
            changes[key] = float("inf")
            continue
        finite = np.isfinite(array) & np.isfinite(other)
        changes[key] = float(np.abs(np.where(finite, other, 0) - np.where(finite, array, 0)).max())
    return changes


def allowed_errors(values: Mapping[Key, Any], changes: list[dict[Key, float]]) -> dict[Key, float]:
    """Return how far each floating value may be off.

    Args:
        values: of the single-device run.
        changes: of each perturbed run, as :func:`largest_changes` returns them.
    """
    return {key: MULTIPLE * change for key, change in _units(values, changes)}


def describe(dtype: str) -> str:
    """Return the bound in words."""
    return (
        f"{MULTIPLE:g} x what one unit in the last place of {dtype} in inputs, weights, outputs of modules and "
        f"gradients does to each tensor ({PAIRS} pairs of runs with opposite signs), or {MULTIPLE:g} units of rounding "
        "of its largest value"
    )


def _units(values: Mapping[Key, Any], changes: list[dict[Key, float]]) -> Iterator[tuple[Key, float]]:
    for key, array in values.items():
        if array is not None and array.dtype.kind in "fc":
            own = unit(array) * magnitude(array)
            yield key, max([own, *(change.get(key, 0.0) for change in changes)])

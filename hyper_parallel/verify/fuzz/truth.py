"""Reference results of a single device, and the tolerance of a correct distributed run.

A program is exact if its leaves are small integers and all its results are small multiples of 1/64. Then nothing is
rounded, and results are compared bitwise. Otherwise tolerances are measured as in
:mod:`hyper_parallel.verify.engine.noise`: the program runs again with leaves, results of steps and gradients perturbed
by one unit in the last place. These repeats run only if a result is not bitwise equal.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Partial
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.checker.difference import difference, is_dyadic
from hyper_parallel.verify.engine.noise import HALF_MULTIPLE, MULTIPLE, NOISE_SHARE, as_wide, movement
from hyper_parallel.verify.fuzz.execution import Key, execute, plain_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.fuzz.language import Language
    from hyper_parallel.verify.fuzz.program import Program

__all__ = ["Result", "Truth", "result_of"]

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10,
        "complex128": 2.0**-52, "complex64": 2.0**-23, "complex32": 2.0**-10, "bcomplex32": 2.0**-7}  # fmt: skip
_HALF = ("bfloat16", "float16", "complex32", "bcomplex32")
_ROUNDING = re.compile("mean|var|std|norm|loss|entropy|kl_div|det|vander|cumprod", re.IGNORECASE)
"""Calls that divide, possibly only in a decomposition or gradient: they round even if the result is an integer."""
_SHARED = (Partial("avg"), Partial("min"), Partial("max"))
_PAIRS = (2, 10)
"""Numbers of antithetic pairs of repeats: at first, and before a result is reported as wrong."""


@dataclass(frozen=True)
class Result:
    """A tensor as data.

    Attributes:
        array: values of the tensor; bfloat16 is stored as float32.
        dtype: name of the tensor's dtype.
    """

    array: Any
    dtype: str


def result_of(tensor: Any, platform: Platform) -> Result | None:
    """Return a plain tensor as data; None stays None."""
    if tensor is None:
        return None
    array = np.array(platform.tensor_to_numpy(platform.detach(tensor)), order="C")
    return Result(array, str(tensor.dtype).rpartition(".")[2].lower())


@dataclass
class Truth:
    """The results of a program on a single device.

    Attributes:
        program: the program.
        platform: the framework.
        language: the framework's functions for random programs.
        results: results by key; None for a gradient that does not exist.
        error: the error that the single device raised instead of returning results.
        exact: whether nothing was rounded.
    """

    program: Program
    platform: Platform
    language: Language
    results: dict[Key, Result | None] = field(default_factory=dict)
    error: str = ""
    exact: bool = False
    _repeats: list[Mapping[Key, Result | None]] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, platform: Platform, language: Language) -> Truth:
        """Run a program on a single device."""
        truth = cls(program, platform, language)
        results = attempt(truth._run, None, 0)
        if isinstance(results, Raised):
            truth.error = str(results)
            return truth
        truth.results = results
        arrays = [result.array for result in truth.results.values() if result is not None]
        halves = any(result.dtype in _HALF for result in truth.results.values() if result is not None)
        halves = halves or any(leaf.dtype in _HALF for leaf in program.leaves.values())
        rounds = _shares_round(program) or any(_ROUNDING.search(step.call) for step in program.steps)
        truth.exact = program.integral and not halves and is_dyadic(arrays) and not rounds
        return truth

    def difference(self, key: Key, actual: Any, box: tuple[slice, ...]) -> str:
        """Return how a shard of a result differs from the single device's; empty if it is correct.

        Args:
            key: key of the result.
            actual: the shard.
            box: index ranges of the shard in the global result.
        """
        result = self.results[key]
        assert result is not None
        expected = result.array[box]
        if actual.shape != expected.shape:
            return f"has local shape {list(actual.shape)}, should have {list(expected.shape)}"
        problem = difference(actual, expected)
        for pairs in () if self.exact else _PAIRS:
            problem = problem and difference(actual, expected, self._allowed(key, result, pairs)[box])
        return problem

    def _allowed(self, key: Key, result: Result, pairs: int) -> Any:
        """Return the tolerance per element; infinity where repeats disagree on integers or on finiteness."""
        while len(self._repeats) < 2 * pairs:
            seed = len(self._repeats) // 2
            for sign in (1, -1):
                self._repeats.append(self._repeat(sign, seed))
        reference = result.array
        repeats = [repeat[key].array for repeat in self._repeats if repeat.get(key) is not None]  # type: ignore[union-attr]
        repeats = [repeat for repeat in repeats if repeat.shape == reference.shape]
        if reference.dtype.kind not in "fc":
            return np.where(_any(reference.shape, [repeat != reference for repeat in repeats]), np.inf, 0.0)
        finite = np.isfinite(reference)
        unstable = _any(reference.shape, [np.isfinite(repeat) != finite for repeat in repeats])
        wide = np.abs(np.where(finite, as_wide(reference), 0.0))
        floor = NOISE_SHARE * self._largest(key[0])
        least = _EPS[result.dtype] * np.maximum(wide, floor)
        multiple = HALF_MULTIPLE if result.dtype in _HALF else MULTIPLE
        allowed = multiple * np.maximum(movement(reference, repeats), least)
        return np.where(unstable, np.inf, np.where(finite, allowed, 0.0))

    def _largest(self, kind: str) -> float:
        """Return the largest finite magnitude among the results of a kind."""
        largest = 0.0
        for key, result in self.results.items():
            if key[0] == kind and result is not None and result.dtype in _EPS and result.array.size:
                magnitudes = np.abs(as_wide(result.array))
                largest = max(largest, float(np.where(np.isfinite(magnitudes), magnitudes, 0.0).max()))
        return largest

    def _repeat(self, sign: int, seed: int) -> Mapping[Key, Result | None]:
        results = attempt(self._run, sign, seed)
        return {} if isinstance(results, Raised) else results  # perturbed values may leave the domain of a function

    def _run(self, sign: int | None, seed: int) -> dict[Key, Result | None]:
        leaves = plain_leaves(self.program, self.platform, self.language)
        after = None
        if sign is not None:
            mover = _Mover(self.platform, self.language, sign, seed)
            leaves = {
                number: self.language.leaf(
                    self.platform.detach(mover.moved(number, self.platform.detach(leaf), gradient=False)),
                    requires_grad=self.program.leaves[number].requires_grad,
                )
                for number, leaf in leaves.items()
            }
            after = mover
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = execute(self.program, leaves, self.platform, self.language, after)
        return {key: result_of(tensor, self.platform) for key, tensor in results.items()}


class _Mover:
    """Perturbs tensors, and the gradients that pass them, by one unit in the last place in random directions."""

    def __init__(self, platform: Platform, language: Language, sign: int, seed: int) -> None:
        self.platform, self.language, self.sign, self.seed = platform, language, sign, seed

    def __call__(self, number: int, tensor: Any) -> Any:
        """Return result ``number`` of a step, perturbed."""
        return self.moved(number, tensor, gradient=True)

    def moved(self, number: int, tensor: Any, *, gradient: bool) -> Any:
        """Return a tensor, perturbed if it has a floating-point dtype."""
        result = result_of(tensor, self.platform)
        assert result is not None
        if result.dtype not in _EPS or not result.array.size or not np.isfinite(result.array).all():
            return tensor
        change = self._change(result.array, result.dtype, (self.seed, number, 0))
        back = None
        if gradient:

            def back(grad: Any) -> Any:
                return self._change(grad, result.dtype, (self.seed, number, 1))

        return self.language.moved(tensor, change, back)

    def _change(self, array: Any, dtype: str, seed: tuple[int, ...]) -> Any:
        """Return one unit in the last place of each element, with random signs."""
        directions = self.sign * np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=array.shape)
        return np.asarray(array * (_EPS[dtype] * directions))


def _shares_round(program: Program) -> bool:
    """Whether a leaf is an average, minimum or maximum over a number of ranks that is not a power of two.

    The gradient of a replicated tensor that is combined with such a leaf is divided by the number of ranks and summed:
    six sixths add up to one minus one unit in the last place.
    """
    return any(
        placement in _SHARED and size & (size - 1)
        for leaf in program.leaves.values()
        for placement, size in zip(leaf.placements, program.mesh, strict=True)
    )


def _any(shape: tuple[int, ...], masks: list[Any]) -> Any:
    """Return where any of the masks is true; all False without masks."""
    return np.logical_or.reduce([np.zeros(shape, dtype=bool), *masks])

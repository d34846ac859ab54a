"""``check_function`` compares a function on DTensors with the same function on plain tensors, for all placements.

Every operand gets every requested placement. Outputs and the gradient of every input are compared with the plain run on
every rank, with random cotangents. No scale factor is applied before the comparison, and a run that compared nothing
does not pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._tree import as_list
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.checker.checker import (
    DTensors,
    Expected,
    PlacementChecker,
    Places,
    on_other_device,
)
from hyper_parallel.verify.checker.choices import all_placements
from hyper_parallel.verify.checker.difference import is_floating, magnitude
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["CheckReport", "all_placements", "check_function"]

_PERTURBED_RUNS = 2
"""Number of repetitions of the plain run with perturbed values."""


@dataclass
class CheckReport:
    """The result of :func:`hyper_parallel.verify.check_function`.

    Attributes:
        forward: number of combinations of placements whose outputs were compared with the plain run.
        backward: number of gradients compared with the plain run.
        rejected: placements that were refused with a :class:`~hyper_parallel.errors.HyperParallelError`, with the
            error.
        wrong: placements whose values or gradients differ, with the difference.
    """

    forward: int = 0
    backward: int = 0
    rejected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.forward > 0 and not self.wrong

    @property
    def all_held(self) -> bool:
        """Whether every placement was compared, nothing differed, and nothing was refused."""
        return self.ok and not self.rejected


def check_function(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    mesh_shape: Sequence[int],
    *,
    platform: str,
    placements: Sequence[Sequence[tuple[Placement, ...]]] | None = None,
    partial: Sequence[str] = ("sum",),
    limit: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    device: str = "cpu",
) -> CheckReport:
    """Check ``fn`` on every combination of placements of its tensor arguments, on simulated ranks.

    Args:
        fn: function of one tensor per array of ``arrays``; returns a tensor or a sequence of tensors.
        arrays: global values; a gradient is checked for floating ones.
        mesh_shape: sizes of the mesh's axes; their product is the number of ranks.
        platform: ``torch`` or ``mindspore``.
        placements: tuples of placements to try per operand, each with one placement per axis; all by default.
        partial: reductions to try as Partial operands (floating operands only): sum, avg, max, min.
        limit: maximum number of combinations, chosen at random.
        seed: seed of the choice, the partial values and the cotangents.
        tolerance: relative tolerance; by default, 64 units in the last place of the dtype, relative to the magnitude of
            the result, or of its terms if large terms cancel.
        device: device that the plain run and all ranks compute on: ``cpu``, ``cuda`` or ``npu``; see :func:`simulate`.

    Returns:
        a report with the numbers of compared outputs and gradients, the refused placements, and the differences.

    Raises:
        RankFailedError: ``fn`` raised an error other than a refusal of its placements, returned a plain tensor for
            DTensors, called different collectives on its ranks, or its plain outputs are all zero or not finite.
    """
    arrays = [np.asarray(array) for array in arrays]
    if placements is None:
        placements = [
            all_placements(array.ndim, len(mesh_shape), partial=partial if array.dtype.kind == "f" else ())
            for array in arrays
        ]
    combinations = list(itertools.product(*placements))
    if limit is not None and len(combinations) > limit:
        chosen = np.random.default_rng(seed).choice(len(combinations), limit, replace=False)
        combinations = [combinations[index] for index in sorted(chosen)]
    world = int(np.prod(mesh_shape))
    per_rank = simulate(
        _check_rank,
        world,
        platform=platform,
        args=(platform, fn, arrays, tuple(mesh_shape), combinations, seed, tolerance, device),
        timeout=600,
        device=device,
    )
    return _merge(per_rank)


def _merge(per_rank: Sequence[CheckReport]) -> CheckReport:
    """Return one report for all ranks: the smallest number of comparisons of a rank, and the problems of all ranks."""
    forward, backward = min(report.forward for report in per_rank), min(report.backward for report in per_rank)
    wrong = [f"rank {rank}: {line}" for rank, report in enumerate(per_rank) for line in report.wrong]
    return CheckReport(forward, backward, per_rank[0].rejected, wrong)


def _check_rank(
    platform_name: str,
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    mesh_shape: tuple[int, ...],
    combinations: Sequence[Places],
    seed: int,
    tolerance: float | None,
    device: str,
) -> CheckReport:
    platform = platform_named(platform_name)
    mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=[f"m{axis}" for axis in range(len(mesh_shape))])
    plain = _PlainRuns(platform, fn, arrays, seed, tolerance)
    expected = plain.expected(mesh.device_type)
    tensors = DTensors(platform, mesh, len(expected.outputs))
    checker = PlacementChecker(plain.call, arrays, expected, mesh, tensors)
    report = CheckReport()
    for number, combination in enumerate(combinations):
        name = " ".join(str(list(placements)) for placements in combination)
        result = checker.check(combination, seed, number)
        if result.refused_by:
            report.rejected.append(f"{name}: {result.refusal}")
            continue
        report.forward += 1
        report.backward += result.gradients
        report.wrong.extend(f"{name}: {str(problem).replace('of operand', 'of input')}" for problem in result.problems)
    return report


class _PlainRuns:
    """Runs a function on plain tensors of one device, to get its results and measure its rounding errors."""

    def __init__(
        self, platform: Platform, fn: Callable[..., Any], arrays: Sequence[Any], seed: int, tolerance: float | None
    ) -> None:
        self.platform, self.fn, self.arrays, self.tolerance = platform, fn, arrays, tolerance
        self.rng = np.random.default_rng(seed + 1)

    def call(self, operands: Sequence[Any]) -> list[Any]:
        """Call the function."""
        return as_list(self.fn(*operands))

    def expected(self, device: str) -> Expected:
        """Return outputs, cotangents and gradients, with the magnitudes to which their tolerances are relative.

        Raises:
            ValueError: an output is on a different device, or all outputs are zero or not finite.
        """
        plain = self.call([self.platform.from_numpy(array) for array in self.arrays])
        if elsewhere := on_other_device(plain, device):
            msg = f"on one device, the function's output {elsewhere}"
            raise ValueError(msg)
        outputs = [self.platform.tensor_to_numpy(self.platform.detach(tensor)) for tensor in plain]
        cotangents = [_cotangent(self.rng, array) for array in outputs]
        grads = self._run(self.arrays, cotangents)[1]
        _reject_degenerate(outputs)
        scales = self._scales([*outputs, *grads], cotangents)
        return Expected(
            outputs, cotangents, grads, tolerance=self.tolerance,
            output_scales=scales[: len(outputs)], grad_scales=scales[len(outputs) :],
        )  # fmt: skip

    def _run(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return outputs and gradients, as arrays."""
        leaves = [self.platform.from_numpy(array) for array in arrays]
        seeds = [None if cotangent is None else self.platform.from_numpy(cotangent) for cotangent in cotangents]
        floating = [is_floating(array) for array in arrays]
        outs, grads = harness_of(self.platform).vjp(lambda *xs: self.call(xs), leaves, seeds, floating)
        return [
            [None if tensor is None else self.platform.tensor_to_numpy(tensor) for tensor in tensors]
            for tensors in ([self.platform.detach(out) for out in outs], grads)
        ]  # type: ignore[return-value] # two

    def _scales(self, expected: Sequence[Any], cotangents: Sequence[Any]) -> list[float]:
        """Return per array the magnitude to which its tolerance is relative.

        If large terms cancel, this is the magnitude of the terms instead of the result. The terms are unknown, but
        their rounding errors are measured by repeating the plain run in double precision, and with operands and
        cotangents perturbed by one unit in the last place. For results in double precision, nothing is repeated: the
        magnitude is that of the result, but at least 1.
        """
        scales = [magnitude(array) if _is_single([array]) else math.inf for array in expected]
        perturb: list[Any] = [_in_double, *[functools.partial(_nudged, self.rng)] * _PERTURBED_RUNS]
        for change in perturb if _is_single(expected) and self.tolerance is None else ():
            results = attempt(self._run, change(self.arrays), change(cotangents))
            if isinstance(results, Raised):  # there are no kernels for doubles, or a perturbed operand is not allowed
                scales = [math.inf] * len(expected)
                break
            noise = map(_rounding_scale, [*results[0], *results[1]], expected)
            scales = [max(*pair) for pair in zip(scales, noise, strict=True)]
        # At most 1, or the result's magnitude: at a discontinuity, results change by more than rounding errors.
        return [min(scale, max(1.0, magnitude(array))) for scale, array in zip(scales, expected, strict=True)]


def _cotangent(rng: Any, array: Any) -> Any:
    return np.asarray(rng.standard_normal(array.shape)).astype(array.dtype) if is_floating(array) else None


def _reject_degenerate(expected: Sequence[Any]) -> None:
    floating = [array for array in expected if is_floating(array) and array.size > 1]
    if floating and all(not np.isfinite(array).any() or not array.any() for array in floating):
        msg = "the sample gives outputs that are all zero or not finite: anything would pass"
        raise ValueError(msg)


# -- rounding of the plain run -----------------------------------------------------------------------------------------


def _is_single(arrays: Sequence[Any]) -> bool:
    """Whether no floating-point array has double precision."""
    return all(not is_floating(array) or array.dtype not in (np.float64, np.complex128) for array in arrays)


def _in_double(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, with floating-point ones converted to double precision."""
    wide = {"f": np.float64, "c": np.complex128}
    return [array if array is None else array.astype(wide.get(array.dtype.kind, array.dtype)) for array in arrays]


def _nudged(rng: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays; every floating-point element is perturbed by one unit in the last place, up or down."""
    return [
        np.asarray(array * (1 + np.finfo(array.dtype).eps * rng.choice((-1, 1), array.shape))).astype(array.dtype)
        if is_floating(array)
        else array
        for array in arrays
    ]


def _rounding_scale(actual: Any, expected: Any) -> float:
    """Return the magnitude of which one unit in the last place is the largest difference; infinite if shapes differ."""
    if not is_floating(expected):
        return 0.0
    if actual.shape != expected.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        return magnitude(actual - expected) / float(np.finfo(expected.dtype).eps)

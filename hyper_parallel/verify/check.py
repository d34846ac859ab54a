"""``check_function``: compare a function on DTensors with the plain function, for all placements.

Every operand is given every placement asked for; outputs and the gradient of every input are compared with the plain
run on every rank, under random cotangents. No scale factor is applied, and a run that compared nothing is not ok.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.errors import CollectiveMismatchError, HyperParallelError, ShardMismatchError
from hyper_parallel.platform.select import platform_named, platform_of
from hyper_parallel.verify.compare import elementwise_difference, magnitude
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate

__all__ = ["CheckReport", "all_placements", "check_function", "decompose", "on_other_device", "seedable"]


_REDUCTIONS = ("sum", "avg", "max", "min")
"""Reductions whose partial values can be sampled."""

_PERTURBED_RUNS = 2
"""Repetitions of the plain run with other roundings."""


@dataclass
class CheckReport:
    """The result of :func:`hyper_parallel.verify.check_function`.

    Attributes:
        forward: number of combinations of placements whose outputs were compared with the plain run.
        backward: number of gradients compared with the plain run.
        rejected: placements refused with a :class:`~hyper_parallel.errors.HyperParallelError`, and the error.
        wrong: placements whose values or gradients differ, and how.
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


def all_placements(ndim: int, mesh_ndim: int, *, partial: Sequence[str] = ("sum",)) -> list[tuple[Placement, ...]]:
    """Return every tuple of placements of a tensor of ``ndim`` dims on ``mesh_ndim`` axes.

    Args:
        ndim: dims of the tensor.
        mesh_ndim: axes of the mesh.
        partial: reductions of Partial; a tuple has at most one of them.
    """
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim)), *(Partial(op) for op in partial)]
    tuples = itertools.product(choices, repeat=mesh_ndim)
    return [
        placements
        for placements in tuples
        if len({placement for placement in placements if isinstance(placement, Partial)}) <= 1
    ]


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
        fn: takes as many tensors as there are ``arrays``; returns a tensor or a sequence of tensors.
        arrays: global values; a gradient is checked for floating ones.
        mesh_shape: sizes of the mesh's axes; the world size is their product.
        platform: ``torch`` or ``mindspore``.
        placements: per operand the tuples to try, one placement per axis each; all of them by default.
        partial: reductions to try as Partial operands (floating operands only): sum, avg, max, min.
        limit: at most so many combinations, chosen at random.
        seed: of the choice, the partial values and the cotangents.
        tolerance: relative bound; by default 64 units in the last place of the dtype, times the magnitude of the
            result, or of the terms where large terms cancel.
        device: ``cpu``, ``cuda`` or ``npu``: where the plain run and all ranks compute; see :func:`simulate`.

    Returns:
        how many outputs and gradients were compared, which placements were refused, and what differs.

    Raises:
        RankFailedError: ``fn`` raised anything but a refusal of its placements, returned a plain tensor for DTensors,
            its ranks joined different collectives, or its plain outputs are all zero or not finite.
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
    """Return one report: the fewest comparisons of any rank, and what is wrong on every rank."""
    forward, backward = min(report.forward for report in per_rank), min(report.backward for report in per_rank)
    wrong = [f"rank {rank}: {line}" for rank, report in enumerate(per_rank) for line in report.wrong]
    return CheckReport(forward, backward, per_rank[0].rejected, wrong)


def _check_rank(
    platform_name: str,
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    mesh_shape: tuple[int, ...],
    combinations: Sequence[tuple[tuple[Placement, ...], ...]],
    seed: int,
    tolerance: float | None,
    device: str,
) -> CheckReport:
    platform = platform_named(platform_name)
    mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=[f"m{axis}" for axis in range(len(mesh_shape))])
    checker = _Checker(platform, fn, arrays, mesh, seed, tolerance)
    report = CheckReport()
    for number, combination in enumerate(combinations):
        checker.check(combination, number, report)
    return report


class _WrongOutputError(Exception):
    """The function returned more or fewer outputs than on plain tensors, or one on another device."""


class _Checker:
    """Compares one function on many combinations of placements with its plain results, which are computed once."""

    def __init__(
        self, platform: Any, fn: Any, arrays: Sequence[Any], mesh: DeviceMesh, seed: int, tolerance: float | None
    ) -> None:
        self.platform, self.fn, self.arrays, self.mesh, self.seed = platform, fn, arrays, mesh, seed
        self.tolerance = tolerance
        self.floating = [array.dtype.kind in "fc" for array in arrays]
        rng = np.random.default_rng(seed + 1)
        plain = _as_list(fn(*(platform.from_numpy(array) for array in arrays)))
        if elsewhere := on_other_device(plain, mesh.device_type):
            msg = f"on one device, the function's output {elsewhere}"
            raise ValueError(msg)
        self.expected = [platform.tensor_to_numpy(tensor) for tensor in plain]
        self.cotangents = [_cotangent(rng, array) for array in self.expected]
        self.gradients = self._plain_run(self.arrays, self.cotangents)[1]
        _reject_degenerate(self.expected)
        self.output_scales, self.gradient_scales = self._scales(rng)

    def _plain_run(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return outputs and gradients of the function on plain tensors, as arrays."""
        leaves = [self.platform.from_numpy(array) for array in arrays]
        seeds = [None if cotangent is None else self.platform.from_numpy(cotangent) for cotangent in cotangents]
        outs, grads = harness_of(self.platform).vjp(lambda *xs: _as_list(self.fn(*xs)), leaves, seeds, self.floating)
        return [
            [None if tensor is None else self.platform.tensor_to_numpy(tensor) for tensor in tensors]
            for tensors in ([self.platform.detach(out) for out in outs], grads)
        ]  # type: ignore[return-value] # two

    def _scales(self, rng: Any) -> tuple[list[float], list[float]]:
        """Return per output and per gradient the magnitude that its rounding errors are relative to.

        Where large terms cancel, that is the magnitude of the terms and not of the result. The terms are unknown, but
        their rounding shows when the plain run is repeated in double precision, and with operands and cotangents
        changed by a unit in the last place. Results in double precision are not perturbed: they are compared as
        numbers of magnitude 1 or more.
        """
        expected = [*self.expected, *self.gradients]
        scales = [_floating_magnitude(array) if _is_single([array]) else math.inf for array in expected]
        perturb: list[Any] = [_in_double, *[functools.partial(_nudged, rng)] * _PERTURBED_RUNS]
        try:
            for change in perturb if _is_single(expected) and self.tolerance is None else ():
                outs, grads = self._plain_run(change(self.arrays), change(self.cotangents))
                noise = map(_rounding_scale, [*outs, *grads], expected)
                scales = [max(*pair) for pair in zip(scales, noise, strict=True)]
        except Exception:  # noqa: BLE001 - no kernels for doubles, or outside the domain of the function
            scales = [math.inf] * len(expected)
        # Capped at that of numbers around one: a function that jumps changes by more than rounding.
        caps = [max(1.0, _floating_magnitude(array)) for array in expected]
        capped = list(map(min, scales, caps))
        return capped[: len(self.expected)], capped[len(self.expected) :]

    def check(self, combination: tuple[tuple[Placement, ...], ...], number: int, report: CheckReport) -> None:
        """Compare one combination of placements, and add the result to ``report``."""
        name = " ".join(str(list(placements)) for placements in combination)
        layouts = [
            Layout.place(self.mesh, placements, array.shape)
            for placements, array in zip(combination, self.arrays, strict=True)
        ]
        try:
            outs, grads = self._run(layouts, number)
        except (CollectiveMismatchError, ShardMismatchError) as error:
            # Ranks took different paths, or a local result contradicts the rule: an error, not a refusal.
            report.wrong.append(f"{name}: {error}")
            raise
        except _WrongOutputError as error:
            report.forward += 1
            report.wrong.append(f"{name}: {error}")
            return
        except HyperParallelError as error:
            report.rejected.append(f"{name}: {error}")
            return
        report.forward += 1
        report.wrong.extend(f"{name}: output {problem}" for problem in self._compare_outputs(outs))
        for index, (grad, layout) in enumerate(zip(grads, layouts, strict=True)):
            if self.gradients[index] is not None:
                report.backward += 1
                problem = self._compare_gradient(index, grad, layout, number)
                if problem is not None:
                    report.wrong.append(f"{name}: gradient of input {index} {problem}")

    def _run(self, layouts: list[Layout], number: int) -> tuple[list[Any], list[Any]]:
        """Return the outputs as DTensors, and the local gradients of the local operands."""
        platform = self.platform
        leaves = [platform.from_numpy(self._local(index, layout, number)) for index, layout in enumerate(layouts)]
        outputs: list[Any] = []

        def on_locals(*locals_: Any) -> list[Any]:
            wrapped = [platform.wrap(local, layout) for local, layout in zip(locals_, layouts, strict=True)]
            outs = _as_list(self.fn(*wrapped))
            if len(outs) != len(self.expected):
                msg = f"gives {len(outs)} outputs, should give {len(self.expected)}"
                raise _WrongOutputError(msg)
            outputs[:] = outs = seedable(outs)
            locals_out = [out._local for out in outs]
            if elsewhere := on_other_device(locals_out, self.mesh.device_type):
                msg = f"output {elsewhere}"
                raise _WrongOutputError(msg)
            return locals_out

        def local_cotangents(outs: Sequence[Any]) -> list[Any]:
            del outs
            pairs = zip(self.cotangents, outputs, strict=True)
            return [self._local_cotangent(cotangent, out._layout) for cotangent, out in pairs]

        _, grads = harness_of(platform).vjp(on_locals, leaves, local_cotangents, self.floating)
        return outputs, grads

    def _local(self, index: int, layout: Layout, number: int) -> Any:
        """Return this rank's part of operand ``index`` in combination ``number``, the same whenever it is asked for."""
        return decompose(self.arrays[index], layout, self.seed + 1000 * number + index)

    def _local_cotangent(self, cotangent: Any, layout: Layout) -> Any:
        return None if cotangent is None else self.platform.from_numpy(_local_part(cotangent, dual(layout)))

    def _compare_outputs(self, outs: list[Any]) -> list[str]:
        problems = []
        for index, (out, expected) in enumerate(zip(outs, self.expected, strict=True)):
            actual = self.platform.tensor_to_numpy(out.full_tensor())
            problem = elementwise_difference(actual, expected, self.tolerance, self.output_scales[index])
            if problem is not None:
                problems.append(f"{index} ({out.placements}) {problem}")
        return problems

    def _compare_gradient(self, index: int, grad: Any, layout: Layout, number: int) -> str | None:
        expected = _local_part(self.gradients[index], dual(layout))
        for axis, op in layout.partials:
            if op == "avg":
                expected = expected / self.mesh.shape[axis]
        if any(op in {"max", "min"} for _, op in layout.partials):
            # The gradient of an extremum goes to the rank that attains it.
            attained = self._local(index, layout, number) == _local_part(self.arrays[index], dual(layout))
            expected = np.where(attained, expected, np.zeros_like(expected))
        actual = self.platform.tensor_to_numpy(grad)
        return elementwise_difference(actual, expected, self.tolerance, self.gradient_scales[index])


def decompose(array: Any, layout: Layout, seed: int) -> Any:
    """Return this rank's local tensor of a global array.

    Args:
        array: the global value.
        layout: its layout. Partial values are random, of both signs, and differ per element.
        seed: of the partial values.

    Raises:
        ValueError: partial values of a reduction cannot be sampled.
    """
    rng = np.random.default_rng(seed)
    local = array
    for axis, op in layout.partials:
        local = _partial_value(rng, local, op, layout.mesh.shape[axis], layout.mesh.coordinate[axis])  # type: ignore[index]
    return np.array(_local_part(local, layout), order="C")  # ascontiguousarray would make 0-d values 1-d


def _partial_value(rng: Any, array: Any, op: str, count: int, position: int) -> Any:
    """Return the partial value at ``position`` of ``count`` random ones that reduce to ``array``."""
    if op not in _REDUCTIONS:
        msg = f"no partial values of Partial({op!r}) can be sampled; check {', '.join(_REDUCTIONS)}"
        raise ValueError(msg)
    # Partial values of small numbers must not drown them in rounding.
    scale = min(1.0, _floating_magnitude(array) or 1.0) + np.abs(array)
    noise = [(rng.standard_normal(array.shape) * scale).astype(array.dtype) for _ in range(count)]
    if op in {"sum", "avg"}:
        others = sum(noise[1:], np.zeros_like(array))
        total = array * count if op == "avg" else array
        return (total - others).astype(array.dtype) if position == 0 else noise[position]
    winner = rng.integers(0, count, array.shape)
    below = array - np.abs(noise[position]) if op == "max" else array + np.abs(noise[position])
    return np.where(winner == position, array, below).astype(array.dtype)


def _local_part(array: Any, layout: Layout) -> Any:
    return array[tuple(slice(start, stop) for start, stop in layout.local_box())]


def seedable(outs: Sequence[Any]) -> list[Any]:
    """Return outputs of a function of DTensors in layouts whose local cotangent is known on each rank.

    Raises:
        TypeError: an output is no DTensor.
    """
    for out in outs:
        if not isinstance(out, DTensor):
            msg = f"returned a plain {type(out).__name__} instead of a DTensor"
            raise TypeError(msg)
    # The gradient of an average or an extremum is more than a dual layout (``core/dtensor/README.md``): reduce those.
    return [out if all(op == "sum" for _, op in out.layout.partials) else out.reduce_partial() for out in outs]


def on_other_device(tensors: Sequence[Any], device: str) -> str:
    """Return which of the tensors is on another device than a card of this type, or nothing.

    Args:
        tensors: of the framework.
        device: ``cpu`` is not checked: that is where tensors are anyway.
    """
    for index, tensor in enumerate(tensors if device != "cpu" else ()):
        elsewhere = platform_of(tensor).device_beside(tensor, device)
        if elsewhere:
            return f"{index} is on {elsewhere}, and --device is {device}"
    return ""


def _as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _cotangent(rng: Any, array: Any) -> Any:
    if array.dtype.kind not in "fc":
        return None
    return np.asarray(rng.standard_normal(array.shape)).astype(array.dtype)


def _reject_degenerate(expected: Sequence[Any]) -> None:
    floating = [array for array in expected if array.dtype.kind in "fc" and array.size > 1]
    if floating and all(not np.isfinite(array).any() or not array.any() for array in floating):
        msg = "the sample gives outputs that are all zero or not finite: anything would pass"
        raise ValueError(msg)


# -- rounding of the plain run -----------------------------------------------------------------------------------------


def _is_floating(array: Any) -> bool:
    return array is not None and array.dtype.kind in "fc"


def _floating_magnitude(array: Any) -> float:
    """Return the largest finite magnitude of a floating array; 0 for None and other dtypes."""
    return magnitude(array) if _is_floating(array) else 0.0


def _is_single(arrays: Sequence[Any]) -> bool:
    """Return whether no floating array has double precision."""
    return all(not _is_floating(array) or array.dtype not in (np.float64, np.complex128) for array in arrays)


def _in_double(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, floating ones in double precision."""
    wide = {"f": np.float64, "c": np.complex128}
    return [array if array is None else array.astype(wide.get(array.dtype.kind, array.dtype)) for array in arrays]


def _nudged(rng: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, every element of floating ones changed by a unit in its last place, up or down."""
    return [
        np.asarray(array * (1 + np.finfo(array.dtype).eps * rng.choice((-1, 1), array.shape))).astype(array.dtype)
        if _is_floating(array)
        else array
        for array in arrays
    ]


def _rounding_scale(actual: Any, expected: Any) -> float:
    """Return the magnitude of which the difference is one rounding; infinite if even the shape depends on values."""
    if not _is_floating(expected):
        return 0.0
    if actual.shape != expected.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        return magnitude(actual - expected) / float(np.finfo(expected.dtype).eps)

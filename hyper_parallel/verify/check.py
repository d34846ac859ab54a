"""Does a function mean the same on DTensors as on plain tensors? Checked by brute force over placements.

Every operand is laid out in every way asked for; outputs and the gradient of every input are compared with the plain
run on every rank, under random cotangents. Nothing is scaled, and a run that compared nothing is not ok.
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
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

__all__ = ["CheckReport", "all_placements", "check_function", "decompose", "seedable"]


_SUMMANDS = ("sum", "avg", "max", "min")

NUDGES = 2
"""Repetitions of the plain run with other roundings."""


@dataclass
class CheckReport:
    """Outcomes of one check.

    Attributes:
        forward: outputs compared with the plain run.
        backward: gradients compared with the plain run.
        rejected: placements refused with a clear error, and the error.
        wrong: placements whose values or gradients differ, and how.
    """

    forward: int = 0
    backward: int = 0
    rejected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when something was compared and nothing differed."""
        return self.forward > 0 and not self.wrong

    @property
    def all_held(self) -> bool:
        """True when every placement was compared, nothing differed, and nothing was refused."""
        return self.ok and not self.rejected


def all_placements(ndim: int, mesh_ndim: int, *, partial: Sequence[str] = ("sum",)) -> list[tuple[Placement, ...]]:
    """Every tuple of placements of a tensor of ``ndim`` dims on ``mesh_ndim`` axes; one kind of Partial each."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim)), *(Partial(op) for op in partial)]
    tuples = list(itertools.product(kinds, repeat=mesh_ndim))
    return [one for one in tuples if len({place for place in one if isinstance(place, Partial)}) <= 1]


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
) -> CheckReport:
    """Check ``fn`` on every combination of placements of its tensor arguments, in the simulated cluster.

    Args:
        fn: takes as many tensors as there are ``arrays``; returns a tensor or a sequence of tensors.
        arrays: global values; floating ones get a gradient.
        mesh_shape: axes of the mesh; the world is their product.
        platform: ``torch`` or ``mindspore``.
        placements: per operand the tuples to try; all of them by default.
        partial: reductions to try as Partial operands (floating operands only): sum, avg, max, min.
        limit: at most so many combinations, drawn at random.
        seed: of the draw, the summands and the cotangents.
        tolerance: relative bound; by default 64 units in the last place of the dtype times the magnitude, where large
            terms cancel theirs.
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
        args=(platform, fn, arrays, tuple(mesh_shape), combinations, seed, tolerance),
        timeout=600,
    )
    return _merge(per_rank)


def _merge(per_rank: Sequence[CheckReport]) -> CheckReport:
    merged = CheckReport(
        min(one.forward for one in per_rank), min(one.backward for one in per_rank), per_rank[0].rejected
    )
    for rank, one in enumerate(per_rank):
        merged.wrong.extend(f"rank {rank}: {line}" for line in one.wrong)
    return merged


def _check_rank(
    platform_name: str,
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    mesh_shape: tuple[int, ...],
    combinations: Sequence[tuple[tuple[Placement, ...], ...]],
    seed: int,
    tolerance: float | None,
) -> CheckReport:
    platform = platform_named(platform_name)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=[f"m{axis}" for axis in range(len(mesh_shape))])
    checker = _Checker(platform, fn, arrays, mesh, seed, tolerance)
    report = CheckReport()
    for number, combination in enumerate(combinations):
        checker.check(combination, number, report)
    return report


class _OtherCountError(Exception):
    """The function returned more or fewer outputs than on plain tensors."""


class _Checker:
    """One function and its plain results, compared again and again."""

    def __init__(
        self, platform: Any, fn: Any, arrays: Sequence[Any], mesh: DeviceMesh, seed: int, tolerance: float | None
    ) -> None:
        self.platform, self.fn, self.arrays, self.mesh, self.seed = platform, fn, arrays, mesh, seed
        self.tolerance = tolerance
        self.floating = [array.dtype.kind in "fc" for array in arrays]
        rng = np.random.default_rng(seed + 1)
        plain = _as_list(fn(*(platform.from_numpy(array) for array in arrays)))
        self.expected = [platform.tensor_to_numpy(one) for one in plain]
        self.seeds = [_cotangent(rng, one) for one in self.expected]
        self.gradients = self._plain_run(self.arrays, self.seeds)[1]
        _reject_degenerate(self.expected)
        self.output_scales, self.gradient_scales = self._scales(rng)

    def _plain_run(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        leaves = [self.platform.from_numpy(array) for array in arrays]
        seeds = [None if seed is None else self.platform.from_numpy(seed) for seed in cotangents]
        outs, grads = self.platform.vjp(lambda *xs: _as_list(self.fn(*xs)), leaves, seeds, self.floating)
        return [
            [None if one is None else self.platform.tensor_to_numpy(one) for one in found]
            for found in ([self.platform.detach(out) for out in outs], grads)
        ]  # type: ignore[return-value] # two

    def _scales(self, rng: Any) -> tuple[list[float], list[float]]:
        """Per output and per gradient the magnitude that its rounding errors are relative to.

        Where large terms cancel, that is theirs and not the result's. They are not known, but what rounding does to
        them shows: the plain run is repeated in double precision, and with operands and cotangents a unit in the last
        place off. Doubles themselves are taken to be of numbers around one, whose roundings no error is as small as.
        """
        wanted = [*self.expected, *self.gradients]
        found = [_magnitude(one) if _is_single([one]) else math.inf for one in wanted]
        repeated: list[Any] = [_widened, *[functools.partial(_nudged, rng)] * NUDGES]
        try:
            for other in repeated if _is_single(wanted) and self.tolerance is None else ():
                outs, grads = self._plain_run(other(self.arrays), other(self.seeds))
                found = [max(*pair) for pair in zip(found, map(_noise, [*outs, *grads], wanted), strict=True)]
        except Exception:  # noqa: BLE001 - no kernels for doubles, or off the edge of what the function takes
            found = [math.inf] * len(wanted)
        # Never more than of numbers around one: a function that jumps says nothing by jumping.
        capped = [min(one, max(1.0, _magnitude(whole))) for one, whole in zip(found, wanted, strict=True)]
        return capped[: len(self.expected)], capped[len(self.expected) :]

    def check(self, combination: tuple[tuple[Placement, ...], ...], number: int, report: CheckReport) -> None:
        what = " ".join(str(list(one)) for one in combination)
        layouts = [
            Layout.place(self.mesh, places, array.shape) for places, array in zip(combination, self.arrays, strict=True)
        ]
        try:
            outs, grads = self._run(layouts, number)
        except (CollectiveMismatchError, ShardMismatchError) as error:
            # Ranks that went different ways, or a local result that is not what the rule says: no rejection.
            report.wrong.append(f"{what}: {error}")
            raise
        except _OtherCountError as error:
            report.forward += 1
            report.wrong.append(f"{what}: {error}")
            return
        except HyperParallelError as error:
            report.rejected.append(f"{what}: {error}")
            return
        report.forward += 1
        report.wrong.extend(f"{what}: output {problem}" for problem in self._compare_outputs(outs))
        for index, (grad, layout) in enumerate(zip(grads, layouts, strict=True)):
            if self.gradients[index] is not None:
                report.backward += 1
                problem = self._compare_gradient(index, grad, layout, number)
                if problem is not None:
                    report.wrong.append(f"{what}: gradient of input {index} {problem}")

    def _run(self, layouts: list[Layout], number: int) -> tuple[list[Any], list[Any]]:
        platform = self.platform
        leaves = [platform.from_numpy(self._piece(index, layout, number)) for index, layout in enumerate(layouts)]
        kept: list[Any] = []

        def on_locals(*locals_: Any) -> list[Any]:
            wrapped = [platform.wrap(local, layout) for local, layout in zip(locals_, layouts, strict=True)]
            outs = _as_list(self.fn(*wrapped))
            if len(outs) != len(self.expected):
                msg = f"gives {len(outs)} outputs, should give {len(self.expected)}"
                raise _OtherCountError(msg)
            kept[:] = outs = seedable(outs)
            return [out._local for out in outs]

        def seeds_for(outs: Sequence[Any]) -> list[Any]:
            del outs
            return [self._local_seed(seed, out._layout) for seed, out in zip(self.seeds, kept, strict=True)]

        _, grads = platform.vjp(on_locals, leaves, seeds_for, self.floating)
        return kept, grads

    def _piece(self, index: int, layout: Layout, number: int) -> Any:
        return decompose(self.arrays[index], layout, self.seed + 1000 * number + index)

    def _local_seed(self, seed: Any, layout: Layout) -> Any:
        return None if seed is None else self.platform.from_numpy(_own(seed, dual(layout)))

    def _compare_outputs(self, outs: list[Any]) -> list[str]:
        problems = []
        for index, (out, wanted) in enumerate(zip(outs, self.expected, strict=True)):
            whole = self.platform.tensor_to_numpy(out.full_tensor())
            problem = _difference(whole, wanted, self.tolerance, self.output_scales[index])
            if problem is not None:
                problems.append(f"{index} ({out.placements}) {problem}")
        return problems

    def _compare_gradient(self, index: int, grad: Any, layout: Layout, number: int) -> str | None:
        if grad is None:
            return "is missing"
        wanted = _own(self.gradients[index], dual(layout))
        for axis, op in layout.partials:
            if op == "avg":
                wanted = wanted / self.mesh.shape[axis]
        if any(op in {"max", "min"} for _, op in layout.partials):
            attained = self._piece(index, layout, number) == _own(self.arrays[index], dual(layout))
            wanted = np.where(attained, wanted, np.zeros_like(wanted))
        return _difference(self.platform.tensor_to_numpy(grad), wanted, self.tolerance, self.gradient_scales[index])


def decompose(array: Any, layout: Layout, seed: int) -> Any:
    """This rank's piece of ``array``; summands of Partial axes are random, of both signs, and differ per element."""
    rng = np.random.default_rng(seed)
    piece = array
    for axis, op in layout.partials:
        piece = _summand(rng, piece, op, layout.mesh.shape[axis], layout.mesh.coordinate[axis])  # type: ignore[index]
    return np.array(_own(piece, layout), order="C")  # ascontiguousarray would make 0-d values 1-d


def _summand(rng: Any, array: Any, op: str, count: int, position: int) -> Any:
    if op not in _SUMMANDS:
        msg = f"no summands of Partial({op!r}) can be drawn; check {', '.join(_SUMMANDS)}"
        raise ValueError(msg)
    # Summands of small values must not drown them in rounding.
    largest = _magnitude(array) if array.dtype.kind in "fc" else 1.0
    scale = min(1.0, largest or 1.0) + np.abs(array)
    noise = [(rng.standard_normal(array.shape) * scale).astype(array.dtype) for _ in range(count)]
    if op in {"sum", "avg"}:
        others = sum(noise[1:], np.zeros_like(array))
        total = array * count if op == "avg" else array
        return (total - others).astype(array.dtype) if position == 0 else noise[position]
    winner = rng.integers(0, count, array.shape)
    below = array - np.abs(noise[position]) if op == "max" else array + np.abs(noise[position])
    return np.where(winner == position, array, below).astype(array.dtype)


def _own(array: Any, layout: Layout) -> Any:
    return array[tuple(slice(start, stop) for start, stop in layout.local_box())]


def seedable(outs: Sequence[Any]) -> list[Any]:
    """Outputs of a function of DTensors, in layouts whose cotangent is known on each rank.

    Raises:
        TypeError: one is no DTensor.
    """
    for out in outs:
        if not isinstance(out, DTensor):
            msg = f"returned a plain {type(out).__name__} instead of a DTensor"
            raise TypeError(msg)
    # The dual layout of averages and extrema is not all of their gradient (``core/dtensor/README.md``): reduce them.
    return [out if all(op == "sum" for _, op in out.layout.partials) else out.reduce_partial() for out in outs]


def _as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _cotangent(rng: Any, array: Any) -> Any:
    if array.dtype.kind not in "fc":
        return None
    return np.asarray(rng.standard_normal(array.shape)).astype(array.dtype)


def _reject_degenerate(expected: Sequence[Any]) -> None:
    floating = [one for one in expected if one.dtype.kind in "fc" and one.size > 1]
    if floating and all(not np.isfinite(one).any() or not one.any() for one in floating):
        msg = "the sample gives outputs that are all zero or not finite: anything would pass"
        raise ValueError(msg)


def _magnitude(array: Any) -> float:
    """The largest finite magnitude; 0 of what has no gradient, or no number."""
    if array is None or array.dtype.kind not in "fc" or not array.size:
        return 0.0
    return float(np.abs(np.where(np.isfinite(array), array, 0)).max())


def _is_single(arrays: Sequence[Any]) -> bool:
    """True when nothing floating is a double."""
    return all(
        one is None or one.dtype.kind not in "fc" or one.dtype not in (np.float64, np.complex128) for one in arrays
    )


def _widened(arrays: Sequence[Any]) -> list[Any]:
    """The floating ones as doubles."""
    wide = {"f": np.float64, "c": np.complex128}
    return [one if one is None else one.astype(wide.get(one.dtype.kind, one.dtype)) for one in arrays]


def _nudged(rng: Any, arrays: Sequence[Any]) -> list[Any]:
    """The floating ones with every element a unit in its last place off, up or down."""
    return [
        array
        if array is None or array.dtype.kind not in "fc"
        else np.asarray(array * (1 + np.finfo(array.dtype).eps * rng.choice((-1, 1), array.shape))).astype(array.dtype)
        for array in arrays
    ]


def _noise(found: Any, wanted: Any) -> float:
    """The magnitude of which the difference is one rounding; all there is where the shape depends on values."""
    if wanted is None or wanted.dtype.kind not in "fc":
        return 0.0
    if found.shape != wanted.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        return _magnitude(found - wanted) / float(np.finfo(wanted.dtype).eps)


def _difference(found: Any, wanted: Any, tolerance: float | None, scale: float | None = None) -> str | None:
    if found.shape != wanted.shape:
        return f"has shape {found.shape}, should have {wanted.shape}"
    if found.dtype != wanted.dtype:
        return f"has dtype {found.dtype}, should have {wanted.dtype}"
    if wanted.size == 0:
        return None
    if wanted.dtype.kind not in "fc":
        return None if (found == wanted).all() else f"differs in {int((found != wanted).sum())} elements"
    bound = float(64 * np.finfo(wanted.dtype).eps) if tolerance is None else tolerance
    scale = max(1.0, _magnitude(wanted)) if scale is None or tolerance is not None else scale
    same = np.isclose(found, wanted, rtol=bound, atol=bound * scale, equal_nan=True)
    if same.all():
        return None
    worst = np.unravel_index(np.argmax(~same), same.shape)
    return f"is {found[worst]!r} at {worst}, should be {wanted[worst]!r} ({int((~same).sum())} of {same.size} differ)"

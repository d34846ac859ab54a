"""Every placement to every placement: values, gradients, and bytes against the least that any algorithm could do."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import Coordinate, coordinates
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.dtensor.transition import Transition, plan_transition
from hyper_parallel.errors import LayoutError, RankFailedError, ShardMismatchError
from hyper_parallel.verify.check import all_placements, check_function

__all__ = ["MESHES", "QUICK_MESHES", "RedistributionReport", "first_wrong", "least_received", "verify_redistribution"]

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3))
QUICK_MESHES = ((2,), (3,), (2, 2))
SHAPE = (7, 5)
"""Divides by no mesh, so that chunks differ, and on four ranks one of five columns is left over."""

PARTIAL = ("sum", "avg", "max", "min")


@dataclass
class RedistributionReport:
    """What one mesh gave.

    Attributes:
        platform: the framework.
        mesh: sizes of its axes.
        shape: global shape of the tensor.
        transitions: pairs of placements that were run.
        gradients: gradients that were compared.
        refused: pairs that have no plan, and why.
        wrong: values or gradients that differ, and how.
        bounded: pairs of which the fewest elements are known: all but those that make new summands.
        received: elements that all ranks together receive, over those pairs.
        least: the fewest that would do.
        above: pairs that receive more than the fewest.
        seconds: how long it took.
    """

    platform: str
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    transitions: int = 0
    gradients: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    bounded: int = 0
    received: int = 0
    least: int = 0
    above: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when something was compared and nothing differed."""
        return self.transitions > 0 and self.gradients > 0 and not self.wrong

    def text(self) -> str:
        """A paragraph."""
        sizes, ratio = "x".join(map(str, self.mesh)), self.received / self.least if self.least else 1.0
        held = "equal" if self.ok else "WRONG"
        counts = f"{self.transitions} changes of placement, {self.gradients} gradients, {len(self.refused)} refused"
        bytes_ = f"{self.received} elements received, at least {self.least} needed (ratio {ratio:.3f})"
        lines = [
            f"{self.platform}, mesh {sizes}, tensor {list(self.shape)}: {held}, {counts} ({self.seconds:.1f} s)",
            f"  {bytes_}; {len(self.above)} of {self.bounded} changes receive more than the least",
        ]
        return "\n".join([*lines, *(f"  wrong: {one}" for one in self.wrong[:5])])

    def json(self) -> dict[str, Any]:
        """Everything."""
        return {**vars(self), "mesh": list(self.mesh), "shape": list(self.shape), "ok": self.ok}


def verify_redistribution(
    platform: str, mesh: Sequence[int], shape: Sequence[int] = SHAPE, *, seed: int = 0
) -> RedistributionReport:
    """Run every change of placement of a tensor of ``shape`` on a simulated mesh, forward and backward."""
    report = RedistributionReport(platform, tuple(mesh), tuple(shape))
    started = time.perf_counter()
    places = all_placements(len(shape), len(mesh), partial=PARTIAL)
    values = np.random.default_rng(seed).standard_normal(shape)
    for target in places:
        sources = [one for one in places if _counted(report, one, target)]
        if not sources:
            continue
        try:
            found = check_function(
                _Redistribution(target), [values], mesh, platform=platform, placements=[sources], seed=seed
            )
        except RankFailedError as error:
            report.wrong.append(f"to {list(target)}: {str(error.__cause__ or error).splitlines()[0]}")
            continue
        report.transitions += found.forward
        report.gradients += found.backward
        report.refused.extend(f"{one} -> {list(target)}" for one in found.rejected)
        report.wrong.extend(f"{one} -> {list(target)}" for one in found.wrong)
    report.seconds = time.perf_counter() - started
    return report


def first_wrong(
    platform: str, mesh: Sequence[int], shape: Sequence[int] = SHAPE, *, seed: int = 0, targets: int | None = None
) -> str:
    """The first change of placement that does not hold, or nothing.

    Args:
        platform: the framework.
        mesh: sizes of its axes.
        shape: global shape of the tensor.
        seed: draws the order of the targets.
        targets: at most so many of them, each from every placement; None for all.
    """
    places = all_placements(len(shape), len(mesh), partial=PARTIAL)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    for index in rng.permutation(len(places))[:targets]:
        target = places[int(index)]
        report = RedistributionReport(platform, tuple(mesh), tuple(shape))
        sources = [one for one in places if _counted(report, one, target)]
        if sources:
            found = check_function(
                _Redistribution(target), [values], mesh, platform=platform, placements=[sources], seed=seed
            )
            if found.wrong:
                return f"{found.wrong[0]} -> {list(target)}"
    return ""


@dataclass(frozen=True)
class _Redistribution:
    """The function that is checked; of a plain tensor, a copy."""

    target: tuple[Placement, ...]

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x * 1
        moved: Any = x.redistribute(placements=list(self.target))
        if moved.layout is not Layout.place(x.device_mesh, self.target, tuple(x.shape)):
            msg = f"asked for {list(self.target)}, got {moved.layout.notation()}"
            raise ShardMismatchError(msg)
        return moved


def _counted(report: RedistributionReport, source: tuple[Placement, ...], target: tuple[Placement, ...]) -> bool:
    """Add up one plan's elements; False where there is none."""
    size = math.prod(report.mesh)
    mesh = DeviceMesh._interned("cpu", report.mesh, tuple(range(size)), _names(report.mesh), 0)  # noqa: SLF001 - no world
    held, asked = (Layout.place(mesh, places, report.shape) for places in (source, target))
    what = f"{list(source)} -> {list(target)}"
    try:
        steps = plan_transition(held, asked)
    except LayoutError as error:
        report.refused.append(f"{what}: {error}")
        return False
    least = least_received(held, asked)
    if least is None:
        return True
    received = _received(steps)
    report.bounded, report.received, report.least = (
        report.bounded + 1, report.received + received, report.least + least,
    )  # fmt: skip
    if received > least:
        report.above.append(f"{what}: {received} elements, at least {least}")
    return True


def _names(mesh: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"m{axis}" for axis in range(len(mesh)))


def _received(steps: Transition) -> int:
    return sum(step.received_at(at) for step in steps.steps for at in coordinates(steps.source.mesh))


def least_received(source: Layout, target: Layout) -> int | None:
    """The fewest elements that all ranks together must receive, counted element by element.

    A rank that wants an element and does not hold it receives it once. Where an element is held as terms to be
    reduced, all terms but one are received by whoever reduces, and then all but one of those who want it receive it.
    None where the target has summands that the source has not: they may be chosen, and nothing is proven.
    """
    kept = _summed(target)
    if not kept <= _summed(source):
        return None
    reduced = [axis for axis, op in _summed(source) if (axis, op) not in kept]
    ranks = list(coordinates(source.mesh))
    held = {at: source.box_at(at) for at in ranks}
    asked = {at: target.box_at(at) for at in ranks}
    total = 0
    for index in _indices(source.shape or ()):
        holders = {at for at in ranks if _inside(index, held[at])}
        wanted = {at for at in ranks if _inside(index, asked[at])}
        terms = len({tuple(at[axis] for axis in reduced) for at in holders})
        if terms > 1:
            total += terms - 1 + len(wanted) - bool(wanted & holders)
        else:
            total += len(wanted - holders)
    return total


def _summed(layout: Layout) -> set[tuple[int, str]]:
    """Pending reductions; an average is a sum of which every rank knows the factor."""
    return {(axis, "sum" if op == "avg" else op) for axis, op in layout.partials}


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


def _inside(index: Coordinate, box: Any) -> bool:
    return all(low <= one < high for one, (low, high) in zip(index, box, strict=True))

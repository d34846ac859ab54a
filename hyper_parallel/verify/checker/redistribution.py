"""Verifies redistribution of every placement to every placement: values, gradients and received elements."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel._text import first_line
from hyper_parallel.core.dtensor.boxes import Coordinate, coordinates
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.dtensor.transition import Transition, plan_transition
from hyper_parallel.errors import LayoutError, RankFailedError, ShardMismatchError
from hyper_parallel.verify.checker.function import all_placements, check_function
from hyper_parallel.verify.report import Report

__all__ = ["MESHES", "QUICK_MESHES", "RedistributionReport", "first_wrong", "least_received", "verify_redistribution"]

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3))
QUICK_MESHES = ((2,), (3,), (2, 2))
SHAPE = (7, 5)
"""Global shape that no mesh divides, so that shards are uneven: of five columns, four ranks have 2, 2, 1 and 0."""

PARTIAL = ("sum", "avg", "max", "min")


@dataclass
class RedistributionReport(Report):
    """The result of one mesh.

    Attributes:
        platform: the framework.
        mesh: sizes of the mesh's axes.
        shape: global shape of the tensor.
        transitions: number of pairs of placements that were run.
        gradients: number of gradients that were compared.
        refused: pairs that the planner refuses, with the reason.
        wrong: pairs whose values or gradients differ, with the difference.
        bounded: number of pairs for which the least number of received elements is known: all pairs except those whose
            target has partial values that the source does not have.
        received: number of elements that all ranks together receive, summed over these pairs.
        least: lower bound of ``received``.
        above: pairs that receive more elements than their lower bound.
        seconds: duration of the run.
        device: device that ranks compute on.
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
    device: str = "cpu"

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.transitions > 0 and self.gradients > 0 and not self.wrong

    def text(self) -> str:
        """Return the result as a few lines."""
        sizes, ratio = "x".join(map(str, self.mesh)), self.received / self.least if self.least else 1.0
        place = self.platform if self.device == "cpu" else f"{self.platform} on {self.device}"
        verdict = "equal" if self.ok else "WRONG"
        counts = f"{self.transitions} changes of placement, {self.gradients} gradients, {len(self.refused)} refused"
        bytes_ = f"{self.received} elements received, at least {self.least} needed (ratio {ratio:.3f})"
        lines = [
            f"{place}, mesh {sizes}, tensor {list(self.shape)}: {verdict}, {counts} ({self.seconds:.1f} s)",
            f"  {bytes_}; {len(self.above)} of {self.bounded} changes receive more than the least",
        ]
        return "\n".join([*lines, *(f"  wrong: {line}" for line in self.wrong[:5])])

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**vars(self), "mesh": list(self.mesh), "shape": list(self.shape), "ok": self.ok}


def verify_redistribution(
    platform: str, mesh: Sequence[int], shape: Sequence[int] = SHAPE, *, seed: int = 0, device: str = "cpu"
) -> RedistributionReport:
    """Run every redistribution of a tensor on a simulated mesh, forward and backward.

    Args:
        platform: ``torch`` or ``mindspore``.
        mesh: sizes of the mesh's axes.
        shape: global shape of the tensor.
        seed: seed of the values, partial values and cotangents.
        device: device that all ranks share: ``cpu``, ``cuda`` or ``npu``.

    Returns:
        a report with the numbers of comparisons and received elements; it lists a redistribution that raises as wrong.
    """
    report = RedistributionReport(platform, tuple(mesh), tuple(shape), device=device)
    started = time.perf_counter()
    every_placement = all_placements(len(shape), len(mesh), partial=PARTIAL)
    values = np.random.default_rng(seed).standard_normal(shape)
    for target in every_placement:
        sources = [source for source in every_placement if _count_elements(report, source, target)]
        if not sources:
            continue
        try:
            result = check_function(
                _Redistribution(target), [values], mesh, platform=platform, placements=[sources], seed=seed,
                device=device,
            )  # fmt: skip
        except RankFailedError as error:
            report.wrong.append(f"to {list(target)}: {first_line(error.__cause__ or error)}")
            continue
        report.transitions += result.forward
        report.gradients += result.backward
        report.refused.extend(f"{line} -> {list(target)}" for line in result.rejected)
        report.wrong.extend(f"{line} -> {list(target)}" for line in result.wrong)
    report.seconds = time.perf_counter() - started
    return report


def first_wrong(
    platform: str, mesh: Sequence[int], shape: Sequence[int] = SHAPE, *, seed: int = 0, targets: int | None = None
) -> str:
    """Return the first wrong redistribution that is found, or an empty string.

    Args:
        platform: ``torch`` or ``mindspore``.
        mesh: sizes of the mesh's axes.
        shape: global shape of the tensor.
        seed: seed of the values and of the order of the targets.
        targets: maximum number of target placements, each reached from every placement; None for all.
    """
    every_placement = all_placements(len(shape), len(mesh), partial=PARTIAL)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    for index in rng.permutation(len(every_placement))[:targets]:
        target = every_placement[int(index)]
        report = RedistributionReport(platform, tuple(mesh), tuple(shape))
        sources = [source for source in every_placement if _count_elements(report, source, target)]
        if sources:
            result = check_function(
                _Redistribution(target), [values], mesh, platform=platform, placements=[sources], seed=seed
            )
            if result.wrong:
                return f"{result.wrong[0]} -> {list(target)}"
    return ""


@dataclass(frozen=True)
class _Redistribution:
    """A function that redistributes a DTensor to ``target``, and copies a plain tensor."""

    target: tuple[Placement, ...]

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x * 1
        result: Any = x.redistribute(placements=list(self.target))
        if result.layout is not Layout.place(x.device_mesh, self.target, tuple(x.shape)):
            msg = f"asked for {list(self.target)}, got {result.layout.notation()}"
            raise ShardMismatchError(msg)
        return result


def _count_elements(report: RedistributionReport, source: tuple[Placement, ...], target: tuple[Placement, ...]) -> bool:
    """Plan one redistribution, and add its received elements to the report; return False if the planner refuses it."""
    size = math.prod(report.mesh)
    mesh = DeviceMesh._interned("cpu", report.mesh, tuple(range(size)), _names(report.mesh), 0)  # noqa: SLF001 - no world
    before, after = (Layout.place(mesh, placements, report.shape) for placements in (source, target))
    pair = f"{list(source)} -> {list(target)}"
    try:
        steps = plan_transition(before, after)
    except LayoutError as error:
        report.refused.append(f"{pair}: {error}")
        return False
    least = least_received(before, after)
    if least is None:
        return True
    received = _received(steps)
    report.bounded, report.received, report.least = (
        report.bounded + 1, report.received + received, report.least + least,
    )  # fmt: skip
    if received > least:
        report.above.append(f"{pair}: {received} elements, at least {least}")
    return True


def _names(mesh: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"m{axis}" for axis in range(len(mesh)))


def _received(steps: Transition) -> int:
    return sum(step.received_at(rank) for step in steps.steps for rank in coordinates(steps.source.mesh))


def least_received(source: Layout, target: Layout) -> int | None:
    """Return the minimum number of elements that all ranks together must receive, counted element by element.

    A rank that needs an element and does not have it receives it once. If an element is the sum of n partial values,
    ranks receive n - 1 of them to add them up. Then every rank that needs the sum receives it, except a rank that added
    it up.

    Returns:
        the minimum; None if the target has partial values that the source does not have, because ranks can choose these
        without communication.
    """
    kept = _summed(target)
    if not kept <= _summed(source):
        return None
    reduced = [axis for axis, op in _summed(source) if (axis, op) not in kept]
    ranks = list(coordinates(source.mesh))
    before = {rank: source.box_at(rank) for rank in ranks}
    after = {rank: target.box_at(rank) for rank in ranks}
    total = 0
    for index in _indices(source.shape or ()):
        owners = {rank for rank in ranks if _inside(index, before[rank])}
        receivers = {rank for rank in ranks if _inside(index, after[rank])}
        terms = len({tuple(rank[axis] for axis in reduced) for rank in owners})
        if terms > 1:
            total += terms - 1 + len(receivers) - bool(receivers & owners)
        else:
            total += len(receivers - owners)
    return total


def _summed(layout: Layout) -> set[tuple[int, str]]:
    """Return the partial reductions by axis; an average counts as a sum, because its factor is known on every rank."""
    return {(axis, "sum" if op == "avg" else op) for axis, op in layout.partials}


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


def _inside(index: Coordinate, box: Any) -> bool:
    return all(low <= position < high for position, (low, high) in zip(index, box, strict=True))

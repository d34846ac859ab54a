"""Proves the steps of redistributions between all pairs of layouts, on some meshes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify.ops.claims import mesh_of
from hyper_parallel.verify.prove.laws import UnprovenError
from hyper_parallel.verify.prove.step_checker import AT_SIZES, BY_LAW, check_transition
from hyper_parallel.verify.report import Report

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["CASES", "RedistributionProofs", "layouts_of", "prove_redistributions"]

_SHAPES = (*((size,) for size in range(10)), (7, 5), (4, 6), (1, 3), (0, 2), (5, 1))
CASES: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[str, ...]], ...] = (
    *((mesh, _SHAPES, ("sum", "avg", "max", "prod")) for mesh in ((1,), (2,), (3,), (4,))),
    *((mesh, _SHAPES, ("sum", "avg", "max")) for mesh in ((2, 2), (2, 3), (3, 2))),
    ((2, 2, 2), (*((size,) for size in range(10)), (7, 5)), ("sum",)),
)
"""Sizes of the mesh's axes, with the shapes of tensors and the reductions of their partial values."""


@dataclass
class RedistributionProofs(Report):
    """Proofs of the steps of redistributions.

    Attributes:
        changes: number of planned redistributions: pairs of layouts, with and without a varying view.
        refused: number of redistributions that the planner rejects.
        steps: number of steps by kind and by proof.
        extent: meshes and shapes, as text.
        wrong: redistributions with a wrong step, with the reason.
    """

    changes: int = 0
    refused: int = 0
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    extent: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was checked and no step is wrong."""
        return self.changes > 0 and not self.wrong

    def text(self) -> str:
        """Return a text with the number of steps by kind and by proof."""
        lines = [f"{'':16}{BY_LAW:>16}{AT_SIZES:>16}"]
        lines += [
            f"{kind:16}{self.steps[kind, BY_LAW]:16}{self.steps[kind, AT_SIZES]:16}"
            for kind in sorted({kind for kind, _ in self.steps})
        ]
        lines.append(f"{self.changes} changes of placement and their gradients, {self.refused} without a plan")
        lines += [f"sizes: {line}" for line in self.extent]
        return "\n".join([*lines, *(f"wrong: {line}" for line in self.wrong[:20])])

    def json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        steps = [{"kind": kind, "proof": proof, "steps": count} for (kind, proof), count in sorted(self.steps.items())]
        return {**vars(self), "ok": self.ok, "steps": steps}


def prove_redistributions(
    cases: Sequence[tuple[tuple[int, ...], Sequence[tuple[int, ...]], Sequence[str]]],
    progress: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> RedistributionProofs:
    """Check the steps between all layouts, with every order of the axes that shard a dim.

    Args:
        cases: sizes of the mesh's axes, with shapes of tensors and reductions of partial values.
        progress: receives the name of a mesh; returns a context manager inside which this mesh is checked.
    """
    report = RedistributionProofs()
    for counts, shapes, ops in cases:
        mesh = mesh_of(counts)
        name = "x".join(map(str, counts))
        report.extent.append(f"mesh {name}, {', '.join(ops)}: {', '.join(str(list(shape)) for shape in shapes)}")
        with progress(f"mesh {name}"):
            for shape in shapes:
                every = list(layouts_of(mesh, shape, ops))
                for source, target in itertools.product(every, repeat=2):
                    _check(report, source, target)
    return report


def _check(report: RedistributionProofs, source: Layout, target: Layout) -> None:
    used = {axis for axes in target.dim_axes for axis in axes} | {axis for axis, _ in target.partials}
    replicated = tuple(axis for axis in range(target.mesh.ndim) if axis not in used)
    for varying in dict.fromkeys(((), replicated)):
        try:
            transition = plan_transition(source, target, varying)
        except LayoutError:
            report.refused += 1
            continue
        report.changes += 1
        try:
            report.steps.update(check_transition(transition))
        except UnprovenError as error:
            report.wrong.append(f"{source.notation()} -> {target.notation()}: {error}")


def layouts_of(mesh: DeviceMesh, shape: Sequence[int], ops: Sequence[str]) -> Iterator[Layout]:
    """Yield every layout of a tensor: each axis replicated, partial or sharded, in every order of the axes of a dim."""
    places: list[str | int] = ["", *ops, *range(len(shape))]
    for choice in itertools.product(places, repeat=mesh.ndim):
        splits = [[axis for axis, place in enumerate(choice) if place == dim] for dim in range(len(shape))]
        partials = [(axis, place) for axis, place in enumerate(choice) if isinstance(place, str) and place]
        for dim_axes in itertools.product(*map(itertools.permutations, splits)):
            yield Layout.of(mesh, dim_axes, partials, shape)

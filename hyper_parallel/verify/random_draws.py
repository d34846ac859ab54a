"""Random numbers of both runs: plain tensors get the numbers that DTensors would get; ranks' generators are compared.

A random number of a DTensor is a function of seed, number of the call, and global index of the element, so a parallel
run draws the numbers of a single device. In both runs of a verification, the numbers for plain tensors follow the same
rule. A plain tensor is complete on the single device. On a rank it may be a shard, which is inferred from the shape.
Without a verification, the program would draw a plain tensor from the rank's own generator. The states of these
generators are compared between ranks: they must be equal if the ranks draw for the same elements, and must differ if
the ranks draw for different elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.verify.engine.checks import TensorCheck
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.input_error import InputError

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.model.program import Trained

__all__ = ["Draw", "ParallelDraws", "SingleDeviceDraws", "draw_checks", "mask_errors"]

Shape = tuple[int, ...]
Place = tuple[DeviceMesh, list[Any], Shape]


@dataclass(frozen=True)
class Draw:
    """One draw for a plain tensor on one rank of the parallel run.

    Attributes:
        call: number of the draw in the stream of DTensors.
        module: path of the module that drew.
        box: first index and end per dim of the rank's shard.
        state: digest of the framework's generator before the draw.
    """

    call: int
    module: str
    box: tuple[tuple[int, int], ...]
    state: str


class SingleDeviceDraws:
    """Draws of the single device.

    Args:
        rank: this rank, on a mesh of one rank.

    Attributes:
        shapes: shapes of the drawn tensors, by number of the call.
    """

    def __init__(self, rank: int) -> None:
        self._mesh = DeviceMesh("cpu", [rank], mesh_dim_names=("single",))
        self.shapes: dict[int, Shape] = {}

    def place(self, tensor: Any) -> Place:
        """Return the placement of ``tensor``: complete, on a mesh of one rank."""
        shape = tuple(tensor.shape)
        self.shapes[random.get_rng_state()[1]] = shape
        return self._mesh, [Replicate()], shape


class ParallelDraws:
    """Draws of the parallel run.

    Args:
        platform: the framework.
        mesh: mesh of the parallel model.

    Attributes:
        shapes: shapes of the single device's draws, by number of the call.
        draws: draws for plain tensors, by number of the call; the repeated draws of a recomputed forward count once.
    """

    def __init__(self, platform: Platform, mesh: DeviceMesh) -> None:
        self._platform, self._mesh = platform, mesh
        self.shapes: Mapping[int, Shape] = {}
        self.draws: dict[int, Draw] = {}

    def place(self, tensor: Any) -> Place:
        """Return which shard of the single device's tensor ``tensor`` is, inferred from its shape.

        Raises:
            InputError: the shape is ambiguous, or the single device does not draw for a tensor in this call.
        """
        shape, call = tuple(tensor.shape), random.get_rng_state()[1]
        module = module_path() or "(model)"
        whole = self.shapes.get(call)
        if whole is None:
            msg = (
                f"PLAN: module {module} draws random numbers for a plain tensor {list(shape)} as draw {call + 1}, "
                "where the single-device model draws for no plain tensor; both must draw in the same order"
            )
            raise InputError(msg)
        layouts = list(_layouts(shape, whole, self._mesh))
        if len(layouts) != 1:
            msg = (
                f"PLAN: module {module} draws random numbers for a plain tensor {list(shape)}, and it is unknown "
                f"which part of the single device's {list(whole)} that is; let it draw for a DTensor "
                "(use_local_output=False)"
            )
            raise InputError(msg)
        (layout,) = layouts
        state = harness_of(self._platform).generator_state()
        if state is not None and call not in self.draws:
            digest = hashlib.sha256(state).hexdigest()[:16]
            self.draws[call] = Draw(call, module, tuple(map(tuple, layout.local_box())), digest)  # type: ignore[arg-type] # placed
        harness_of(self._platform).advance_generator(shape)
        return self._mesh, list(layout.placements), whole


def draw_checks(alone: Trained, ranks: Sequence[Trained]) -> Iterator[TensorCheck]:
    """Yield the checks of random draws: the masks that ranks would draw by themselves, and the random state.

    Args:
        alone: draws of the single-device run.
        ranks: draws of the ranks.
    """
    for step, (seed, count) in enumerate(alone.random_states):
        if not count:
            continue
        for rank, noted in enumerate(ranks):
            for draw, why in mask_errors([other.draws[step] for other in ranks], rank):
                yield _fact("mask", draw.module, f"{draw.module}, draw {draw.call + 1}", step, rank, why)
            own = noted.random_states[step]
            why = f"seed {own[0]} and {own[1]} draws so far, single device seed {seed} and {count} draws"
            yield _fact("random", "(random)", "random state", step, rank, "" if own == (seed, count) else why)


def _fact(kind: str, module: str, name: str, step: int, rank: int, why: str) -> TensorCheck:
    return TensorCheck(kind, module, name, step, rank, 1, float("inf") if why else 0.0, 0.0, why)


def mask_errors(draws: list[list[Draw]], rank: int) -> Iterator[tuple[Draw, str]]:
    """Yield this rank's draws, each with the reason why the rank's own generator would draw a wrong mask, or "".

    Args:
        draws: draws of every rank.
        rank: this rank.
    """
    by_call = [{draw.call: draw for draw in each} for each in draws]
    for draw in draws[rank]:
        why = ""
        for other, theirs in enumerate(by_call):
            drawn = theirs.get(draw.call)
            if drawn is None or other == rank or why:
                continue
            if drawn.box == draw.box and drawn.state != draw.state:
                why = (
                    f"rank {other} would draw other numbers for the same elements: its generator has another state; "
                    "seed the ranks of one replica equally"
                )
            if drawn.box != draw.box and drawn.state == draw.state:
                why = (
                    f"rank {other} would draw the same numbers for other elements: the ranks share a generator's "
                    "state; seed ranks that hold different parts differently"
                )
        yield draw, why


def _layouts(shape: Shape, whole: Shape, mesh: DeviceMesh) -> Iterator[Layout]:
    """Yield layouts of a tensor ``whole`` in which this rank has ``shape``; one axis shards each dim that differs."""
    if len(shape) != len(whole):
        return
    cut = [dim for dim in range(len(whole)) if shape[dim] != whole[dim]]
    yield from _with_cuts(shape, whole, mesh, cut, [Replicate()] * mesh.ndim)


def _with_cuts(shape: Shape, whole: Shape, mesh: DeviceMesh, cut: list[int], placements: list[Any]) -> Iterator[Layout]:
    if not cut:
        layout = Layout.place(mesh, placements, whole)
        if tuple(layout.local_shape) == shape:
            yield layout
        return
    for axis, size in enumerate(mesh.shape):
        if size > 1 and isinstance(placements[axis], Replicate):
            extended = [*placements[:axis], Shard(cut[0]), *placements[axis + 1 :]]
            yield from _with_cuts(shape, whole, mesh, cut[1:], extended)

"""What a parallel plan will do, before any rank runs: what is sharded how, what is communicated where, how much.

One process plays rank 0 of a mesh of any size through one training step; its collectives return zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.platform.select import use_platform
from hyper_parallel.transport.base import Transport, use_transport
from hyper_parallel.transport.numpy_ops import NumpyOps
from hyper_parallel.transport.single_process import FakeTransport
from hyper_parallel.verify.model_report import Traffic, aligned, table, traffic
from hyper_parallel.verify.spec import user_function
from hyper_parallel.verify.train_compare import run_parallel_step

if TYPE_CHECKING:
    from hyper_parallel.verify.parameter_layouts import ParameterLayout

__all__ = ["Explanation", "explain_model"]


@dataclass(frozen=True)
class Explanation:
    """What one training step does.

    Attributes:
        name: of the model.
        platform: whose.
        mesh: axes with their sizes.
        parameters: where the pieces of every parameter lie.
        dtypes: of the parameters, by path, in short.
        itemsizes: bytes of an element, by path.
        traffic: collectives, per module.
    """

    name: str
    platform: str
    mesh: str
    parameters: list[ParameterLayout]
    dtypes: dict[str, str]
    itemsizes: dict[str, int]
    traffic: list[Traffic]

    def text(self) -> str:
        """Parameters, then collectives."""
        rows = [("parameter", "layout", "bytes on a rank", "of")]
        rows += [(one.path, self._layout(one), str(self._held(one)), str(self._whole(one))) for one in self.parameters]
        held, whole = (sum(map(count, self.parameters)) for count in (self._held, self._whole))
        lines = [f"{self.name} on {self.platform}, mesh {self.mesh}", *aligned(rows, text=2)]
        lines.append(f"    {len(self.parameters)} parameters, {held} of {whole} bytes on a rank")
        return "\n".join([*lines, *table(self.traffic)])

    def json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "name": self.name,
            "platform": self.platform,
            "mesh": self.mesh,
            "parameters": [
                {"path": one.path, "layout": self._layout(one), "bytes": self._held(one), "of": self._whole(one)}
                for one in self.parameters
            ],
            "collectives": [asdict(one) for one in self.traffic],
        }

    def _layout(self, one: ParameterLayout) -> str:
        layout, dtype = one.layout, self.dtypes[one.path]
        return f"{dtype}{list(one.shape)} plain" if layout is None else layout.notation(dtype)

    def _held(self, one: ParameterLayout) -> int:
        """Bytes of the largest piece, which is the first rank's."""
        layout = one.layout
        return math.prod(one.shape if layout is None else layout.local_shape) * self.itemsizes[one.path]

    def _whole(self, one: ParameterLayout) -> int:
        return math.prod(one.shape) * self.itemsizes[one.path]


def explain_model(
    spec: str | Callable[[], Any],
    plan: str | Callable[[Any], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str],
    *,
    platform: str,
    name: str | None = None,
) -> Explanation:
    """What will be sharded how, and which collectives run where in one training step, with their bytes.

    Args:
        spec: as for :func:`~hyper_parallel.verify.verify_model`; the model is built, whole, in this process.
        plan: likewise.
        mesh_shape: sizes of the axes, as large as wanted.
        mesh_names: their names.
        platform: ``torch`` or ``mindspore``.
        name: in the text.

    Values are zeros where they come from other ranks, so a program whose communication depends on values is not
    explained, and one that asks other ranks what they hold is refused.

    Raises:
        ValueError: something that was asked for does not exist or does not fit together.
        UnsupportedOnBackend: (a NotImplementedError) only other ranks could know what comes next.
    """
    shape, names = tuple(mesh_shape), tuple(mesh_names)
    with use_platform(platform), use_transport(_rehearsed(platform, math.prod(shape))):
        found = run_parallel_step(user_function(spec, "SPEC"), user_function(plan, "PLAN"), shape, names)
    mesh = " x ".join(f"{axis}={size}" for axis, size in zip(names, shape, strict=True))
    return Explanation(
        name or str(spec), platform, mesh, found.parameter_layouts, found.dtypes, found.itemsizes, traffic(found.events)
    )


def _rehearsed(platform: str, world_size: int) -> Transport:
    if platform == "torch":
        from hyper_parallel.transport.c10d import TorchOps  # the other framework stays unimported

        return FakeTransport(world_size, TorchOps(), lambda like, shape: like.new_zeros(shape))
    from hyper_parallel.transport.mindspore import NumpyBridge

    return NumpyBridge(FakeTransport(world_size, NumpyOps(), lambda like, shape: np.zeros(shape, like.dtype)))

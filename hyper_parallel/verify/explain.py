"""Explains a parallel plan before any rank runs: the layout of every parameter, and every collective with its bytes.

One process runs one training step as rank 0 of a mesh of any size; its collectives return zeros.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.errors import HyperParallelError, UnsupportedOnBackend
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.transport.base import Transport, use_transport
from hyper_parallel.transport.numpy_ops import NumpyOps
from hyper_parallel.transport.single_process import FakeTransport
from hyper_parallel.verify.card_errors import card_errors
from hyper_parallel.verify.model_case import InputError, as_case
from hyper_parallel.verify.model_report import Traffic, aligned, table, traffic
from hyper_parallel.verify.simulate import require_device
from hyper_parallel.verify.spec import user_function
from hyper_parallel.verify.train_compare import ParallelStep, run_parallel_step
from hyper_parallel.verify.training_runs import build_model

if TYPE_CHECKING:
    from hyper_parallel.verify.parameter_layouts import ParameterLayout

__all__ = ["Explanation", "explain_model"]


@dataclass(frozen=True)
class Explanation:
    """The layouts and collectives of one training step.

    Attributes:
        name: of the model.
        platform: name of the framework.
        mesh: axes with their sizes.
        parameters: layouts of the parameters.
        dtypes: short dtypes of the parameters, by path.
        itemsizes: bytes of an element, by path.
        traffic: collectives, per module.
        with_values: why tensors had values; empty if they had none, and so took no memory.
        device: where the step ran.
        peak: most bytes that were in use there; 0 where none were counted.
    """

    name: str
    platform: str
    mesh: str
    parameters: list[ParameterLayout]
    dtypes: dict[str, str]
    itemsizes: dict[str, int]
    traffic: list[Traffic]
    with_values: str = ""
    device: str = "cpu"
    peak: int = 0

    def text(self) -> str:
        """Return a table of parameters, and one of collectives."""
        rows = [("parameter", "layout", "bytes on a rank", "of")]
        rows += [
            (parameter.path, self._layout(parameter), str(self._local_bytes(parameter)), str(self._bytes(parameter)))
            for parameter in self.parameters
        ]
        local, total = (sum(map(count, self.parameters)) for count in (self._local_bytes, self._bytes))
        lines = [f"{self.name} on {self.platform}, mesh {self.mesh}", *aligned(rows, text=2)]
        lines.append(f"    {len(self.parameters)} parameters, {local} of {total} bytes on a rank")
        if self.peak:
            lines.append(f"    {self.peak} bytes in use on {self.device} at most, measured on rank 0 in this step")
        lines += [f"    {note}" for note in self.empty_shards()]
        if self.with_values:
            reason = "" if self.peak else "without them: "
            lines.append(f"  built with values, because {reason}{self.with_values}")
        return "\n".join([*lines, *table(self.traffic)])

    def json(self) -> dict[str, Any]:
        """Return the same as a JSON object."""
        return {
            "name": self.name,
            "platform": self.platform,
            "mesh": self.mesh,
            "parameters": [
                {
                    "path": parameter.path,
                    "layout": self._layout(parameter),
                    "bytes": self._local_bytes(parameter),
                    "of": self._bytes(parameter),
                }
                for parameter in self.parameters
            ],
            "empty_shards": self.empty_shards(),
            "collectives": [asdict(row) for row in self.traffic],
            "with_values": self.with_values,
            "device": self.device,
            "peak_bytes": self.peak,
        }

    def empty_shards(self) -> list[str]:
        """Return, in words, which parameters have fewer rows in a sharded dim than there are ranks to hold them."""
        notes: dict[str, list[str]] = {}
        for parameter in self.parameters:
            layout = parameter.layout
            if layout is None:
                continue
            for dim, axes in enumerate(layout.dim_axes):
                ranks = math.prod([layout.mesh.shape[axis] for axis in axes])
                if (size := parameter.shape[dim]) < ranks:
                    names = " and ".join(layout.mesh.names[axis] for axis in axes)
                    note = f"size {size} over {ranks} ranks of {names}, {ranks - size} of which hold nothing"
                    notes.setdefault(note, []).append(f"dim {dim} of {parameter.path}")
        return [
            f"{', '.join(subjects[:4])}{' and others' * (len(subjects) > 4)}: {note}"
            for note, subjects in notes.items()
        ]

    def _layout(self, parameter: ParameterLayout) -> str:
        layout, dtype = parameter.layout, self.dtypes[parameter.path]
        return f"{dtype}{list(parameter.shape)} plain" if layout is None else layout.notation(dtype)

    def _local_bytes(self, parameter: ParameterLayout) -> int:
        """Return the bytes of the largest local shard, which is the first rank's."""
        layout = parameter.layout
        shape = parameter.shape if layout is None else layout.local_shape
        return math.prod(shape) * self.itemsizes[parameter.path]

    def _bytes(self, parameter: ParameterLayout) -> int:
        return math.prod(parameter.shape) * self.itemsizes[parameter.path]


_FAILURES = (HyperParallelError, InputError, RuntimeError)

_LARGEST = 4 << 30
"""Bytes of parameters that are made with values."""


def explain_model(
    spec: str | Callable[[], Any],
    plan: str | Callable[[Any], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str],
    *,
    platform: str,
    name: str | None = None,
    device: str = "cpu",
) -> Explanation:
    """Explain how a plan lays out a model's parameters, and which collectives one training step runs in each module.

    Values that come from other ranks are zeros, so a program whose communication depends on values is not explained,
    and one that asks other ranks for objects is refused. On PyTorch tensors have shapes and no values (its meta
    device), so a model takes no memory, whatever its size. A program that reads values runs again with them, unless
    its parameters are larger than 4 GiB.

    Args:
        spec: as for :func:`~hyper_parallel.verify.verify_model`; the whole model is built in this process.
        plan: likewise.
        mesh_shape: sizes of the axes, of any size: no rank runs.
        mesh_names: their names.
        platform: ``torch`` or ``mindspore``.
        name: of the model in the text.
        device: ``cpu``, ``cuda`` or ``npu``: on a card the step runs with values, and its memory is measured.

    Returns:
        layouts and bytes of the parameters, and collectives with the bytes that the worst rank receives.

    Raises:
        ValueError: an argument is wrong, or arguments contradict each other.
        UnsupportedOnBackend: (a NotImplementedError) the program asks other ranks for objects, or the framework sees no
            such card.
    """
    require_device(device, platform)
    shape, names = tuple(mesh_shape), tuple(mesh_names)
    make_case, make_plan = user_function(spec, "SPEC"), user_function(plan, "PLAN")
    run = partial(run_parallel_step, make_case, make_plan, shape, names, device)
    peak = 0
    with use_platform(platform), use_transport(_rehearsed(platform, math.prod(shape))):
        if device != "cpu":
            step, why, peak = _on_card(run, device)
        else:
            step, why = (run(), "") if platform != "torch" else _without_values(run, make_case)
    mesh = " x ".join(f"{axis}={size}" for axis, size in zip(names, shape, strict=True))
    return Explanation(
        name or str(spec),
        platform,
        mesh,
        step.parameter_layouts,
        step.dtypes,
        step.itemsizes,
        traffic(step.events),
        why,
        device,
        peak,
    )


def _on_card(run: Callable[[], ParallelStep], device: str) -> tuple[ParallelStep, str, int]:
    """Return what ``run`` does on a card, why it had values, and the most bytes that it had in use there."""
    platform = current_platform()
    with platform.on_device(device), card_errors(platform, device):
        most = platform.peak_bytes(device)
        return run(), f"memory is measured on {device}", most()


def _without_values(run: Callable[[], ParallelStep], make_case: Callable[[], Any]) -> tuple[ParallelStep, str]:
    """Return what ``run`` does with tensors that have no values, or else with values, and why they were needed.

    Raises:
        InputError: it fails without values, and its parameters are too large to be made with values.
    """
    platform = current_platform()
    without = partial(platform.init_on_device, platform.meta_device, include_buffers=True)
    try:
        with without():
            return run(), ""
    except UnsupportedOnBackend:
        raise
    except _FAILURES as error:
        first = error
    size = 0
    with contextlib.suppress(*_FAILURES), without():
        parameters = platform.parameters_dict(build_model(platform, as_case(make_case()), 0)).values()
        size = sum(math.prod(value.shape) * platform.itemsize(value) for value in parameters)
    if size > _LARGEST:
        msg = (
            f"without values of tensors: {first}; with values its parameters take {size / 2**30:.0f} GiB, and explain "
            f"makes at most {_LARGEST / 2**30:.0f} GiB"
        )
        raise InputError(msg) from first
    return run(), str(first).splitlines()[0]


def _rehearsed(platform: str, world_size: int) -> Transport:
    if platform == "torch":
        from hyper_parallel.transport.c10d import TorchOps  # the other framework stays unimported

        return FakeTransport(world_size, TorchOps(), lambda like, shape: like.new_zeros(shape))
    from hyper_parallel.transport.mindspore import NumpyBridge

    return NumpyBridge(FakeTransport(world_size, NumpyOps(), lambda like, shape: np.zeros(shape, like.dtype)))

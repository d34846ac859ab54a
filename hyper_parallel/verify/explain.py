"""Explains a parallel plan before any rank runs: the layout of every parameter, and every collective with its bytes.

One process runs one training step as the first rank of a mesh of any size, and then as the last rank. Collectives
return zeros in place of the values of other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.errors import HyperParallelError, UnsupportedOnBackend
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.transport.base import Transport, use_transport
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.simulated.single_process import FakeTransport
from hyper_parallel.verify.explained_step import ParallelStep, run_parallel_step
from hyper_parallel.verify.explanation import Explanation
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.input_error import InputError, device_errors
from hyper_parallel.verify.links import links_of
from hyper_parallel.verify.model_case import as_case
from hyper_parallel.verify.model_report import traffic
from hyper_parallel.verify.model_training import build_model
from hyper_parallel.verify.simulate import require_device
from hyper_parallel.verify.spec import user_function

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event

__all__ = ["explain_model", "meta_tensors", "rehearsed_transport"]


_FAILURES = (HyperParallelError, InputError, RuntimeError)

_INSTEAD = "hyper-parallel verify model"
_LARGEST = 4 << 30
"""Largest number of bytes of parameters that are created with values."""


def explain_model(
    spec: str | Callable[[], Any],
    plan: str | Callable[[Any], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str],
    *,
    platform: str,
    name: str | None = None,
    links: Sequence[str] = (),
    device: str = "cpu",
) -> Explanation:
    """Explain a plan's layouts of a model's parameters, and the collectives of one training step in each module.

    Values from other ranks are zeros, so programs whose communication depends on values cannot be explained, and
    programs that request objects from other ranks are rejected. On PyTorch, tensors are on the meta device, where they
    have shapes but no values, so a model of any size takes no memory. A program that reads values runs again with
    values, unless its parameters are larger than 4 GiB.

    Args:
        spec: as for :func:`~hyper_parallel.verify.verify_model`; the complete model is built in this process.
        plan: as for :func:`~hyper_parallel.verify.verify_model`.
        mesh_shape: sizes of the axes; they are not limited, because no rank runs.
        mesh_names: their names.
        platform: ``torch`` or ``mindspore``.
        name: name of the model in the text.
        links: bandwidths and latencies of axes, such as ``tp=300,4`` for 300 GB/s and 4 us; see
            ``hyper_parallel.verify.links.links_of``.
        device: ``cpu``, ``cuda`` or ``npu``. On an accelerator, the step runs with values, as the first rank only, and
            its memory is measured.

    Returns:
        layouts and bytes of the parameters, memory, and collectives with their time and the largest number of bytes
        that a rank receives.

    Raises:
        ValueError: an argument is wrong, or arguments contradict each other.
        UnsupportedOnBackend: (a NotImplementedError) the program requests objects from other ranks, or the framework
            finds no such device.
    """
    require_device(device, platform)
    shape, names = tuple(mesh_shape), tuple(mesh_names)
    priced = links_of(shape, names, links)
    make_case, make_plan = user_function(spec, "SPEC"), user_function(plan, "PLAN")
    run = partial(run_parallel_step, make_case, make_plan, shape, names, device)
    world_size = math.prod(shape)
    peak, other, failure = 0, None, list[str]()
    with use_platform(platform):
        try:
            with use_transport(rehearsed_transport(platform, world_size, 0)):
                if device != "cpu":
                    step, why, peak = _on_accelerator(run, device)
                else:
                    step, why = (run(), "") if platform != "torch" else _without_values(run, make_case)
        except InputError as error:
            smaller = partial(run_parallel_step, make_case, make_plan, mesh_names=names)
            advice = "" if device != "cpu" else _what_runs(smaller, platform, shape, names)
            if not advice:
                raise
            msg = f"{error}\n  {advice}"
            raise InputError(msg) from error
        if device == "cpu":
            other, failure = _last_rank(run, platform, world_size, with_values=bool(why))
    checked, wrong = [], [*step.wrong, *failure]
    if step.gradients:
        checked.append(f"{step.gradients} gradients are laid out as their parameters")
    if other is not None:
        wrong += _differences(step.events, other.events, world_size - 1)
    if not failure and not wrong and other is not None:
        checked.append(f"ranks 0 and {world_size - 1} run the same {len(step.events)} collectives in the same order")
    return Explanation(
        name or str(spec), platform, dict(zip(names, shape, strict=True)), step.parameter_layouts, step.dtypes,
        step.itemsizes, traffic(step.events), step.memory, priced, checked, wrong, step.notes, why, str(plan),
        device, peak, step.plans,
    )  # fmt: skip


def _what_runs(run: Callable[..., ParallelStep], platform: str, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """Return a sentence with the largest number of ranks along an axis for which a plan that fails on ``shape`` runs.

    For example, a program that views its features as heads runs if each rank has complete heads. The result is "" if no
    such number is found.
    """

    def runs(axis: int, size: int) -> bool:
        mesh = (*shape[:axis], size, *shape[axis + 1 :])
        for rank in dict.fromkeys((0, math.prod(mesh) - 1)):
            with (
                use_transport(rehearsed_transport(platform, math.prod(mesh), rank)),
                meta_tensors() if platform == "torch" else contextlib.nullcontext(),
            ):
                try:
                    run(mesh)
                except _FAILURES:
                    return False
        return True

    for axis in reversed(range(len(shape))):
        sizes = [size for size in range(2, shape[axis] + 1) if shape[axis] % size == 0]
        fits, fails = 0, len(sizes) - 1
        if fails < 1 or not runs(axis, sizes[0]):
            continue
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if runs(axis, sizes[middle]) else (fits, middle)
        name = names[axis]
        return (
            f"the plan runs with {name}={sizes[fits]}, and fails with {name}={sizes[fails]}: use at most "
            f"{sizes[fits]} ranks along {name}, or shard less along it"
        )
    return ""


def _on_accelerator(run: Callable[[], ParallelStep], device: str) -> tuple[ParallelStep, str, int]:
    """Return the result of ``run`` on a device, why it had values, and its peak memory there in bytes."""
    platform = current_platform()
    with harness_of(platform).on_device(device), device_errors(platform, device):
        most = harness_of(platform).peak_bytes(device)
        return run(), f"memory is measured on {device}", most()


def _last_rank(
    run: Callable[[], ParallelStep], platform: str, world_size: int, *, with_values: bool
) -> tuple[ParallelStep | None, list[str]]:
    """Return the result of the last rank, whose shards are the smallest, or its error; nothing for a single rank."""
    if world_size == 1:
        return None, []
    rank = world_size - 1
    on_meta = platform == "torch" and not with_values
    with (
        use_transport(rehearsed_transport(platform, world_size, rank)),
        meta_tensors() if on_meta else contextlib.nullcontext(),
    ):
        try:
            return run(), []
        except _FAILURES as error:
            return None, [f"rank {rank} fails where rank 0 does not: {str(error).splitlines()[0]}"]


@contextlib.contextmanager
def meta_tensors() -> Iterator[None]:
    """Make new tensors without values inside this context, except for counters of optimizer steps."""
    platform = current_platform()
    without = platform.init_on_device(platform.meta_device, include_buffers=True)
    with without, harness_of(platform).counters_on_host():
        yield


def _differences(events: Sequence[Event], others: Sequence[Event], rank: int) -> list[str]:
    """Return a sentence on the first collective that differs between rank 0 and ``rank``: they would deadlock there."""
    for number, (own, other) in enumerate(itertools.zip_longest(events, others), 1):
        if own is None or other is None or replace(own, bytes=0) != replace(other, bytes=0):
            return [f"collective {number} differs: on rank 0 {_told(own)}; on rank {rank} {_told(other)}"]
    return []


def _told(event: Event | None) -> str:
    if event is None:
        return "there is none"
    moved = f", {event.source} -> {event.target}" if event.source else ""
    return f"{event.phase} of {event.module or '(model)'}: {event.collective} over {', '.join(event.axes)}{moved}"


def _without_values(run: Callable[[], ParallelStep], make_case: Callable[[], Any]) -> tuple[ParallelStep, str]:
    """Return the result of ``run`` with tensors without values, or else with values, and why they were needed.

    Raises:
        InputError: ``run`` fails without values, and its parameters are too large to be created with values.
    """
    platform = current_platform()
    try:
        with meta_tensors():
            return run(), ""
    except UnsupportedOnBackend:
        raise
    except _FAILURES as error:
        first = error
    size = 0
    with contextlib.suppress(*_FAILURES), meta_tensors():
        parameters = platform.parameters_dict(build_model(platform, as_case(make_case()), 0)).values()
        size = sum(math.prod(value.shape) * platform.itemsize(value) for value in parameters)
    if size > _LARGEST:
        msg = (
            f"without values of tensors: {first}; with values its parameters take {size / 2**30:.0f} GiB, and explain "
            f"makes at most {_LARGEST / 2**30:.0f} GiB"
        )
        raise InputError(msg) from first
    return run(), str(first).splitlines()[0]


def rehearsed_transport(platform: str, world_size: int, rank: int) -> Transport:
    """Return the transport of ``rank`` in a world without other ranks: its collectives return zeros."""
    if platform == "torch":
        from hyper_parallel.transport.real.c10d import TorchOps  # the other framework is not imported

        return FakeTransport(world_size, TorchOps(), lambda like, shape: like.new_zeros(shape), rank, _INSTEAD)
    from hyper_parallel.transport.real.mindspore.transport import NumpyBridge

    fake = FakeTransport(world_size, NumpyOps(), lambda like, shape: np.zeros(shape, like.dtype), rank, _INSTEAD)
    return NumpyBridge(fake)

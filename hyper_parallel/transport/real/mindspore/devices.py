"""MindSpore's ranks on Ascend: finds devices and joins a world over HCCL, or its stand-in over gloo on CPU."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import mindspore
from mindspore import Tensor, communication
from mindspore.device_context import ascend
from mindspore.mint import distributed

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.mindspore.versions import MSContext
from hyper_parallel.transport.base import Shape, Transport
from hyper_parallel.transport.device_types import TOOLS, VISIBLE, dry_run, has_plugin
from hyper_parallel.transport.real.cluster import rank_environment
from hyper_parallel.transport.real.mindspore.rehearsal import RehearsedHccl
from hyper_parallel.transport.real.mindspore.transport import (
    HcclTransport,
    NumpyBridge,
    begin_simulated,
    compute_on_cpu,
    from_host,
    to_host,
)
from hyper_parallel.transport.simulated.transport import SimulatedTransport

__all__ = [
    "SIMULATED",
    "TensorFacts",
    "current_device",
    "exact_products",
    "missing_ascend",
    "require_devices",
    "start_simulated",
    "start_world",
]

_INEXACT = ("Float", "BFloat", "Complex")
SIMULATED = f"{__name__}:start_simulated"
"""The function that starts a simulated rank on a device, as text for
:func:`~hyper_parallel.transport.simulated.processes.run_processes`."""

_PART_OF_MEMORY = "0.25GB"
"""Size of the blocks in which a simulated rank allocates device memory; MindSpore's 2 GB are too much to share."""


class TensorFacts:
    """Facts of MindSpore tensors for fingerprints: the part of :class:`.HostOps` that a guarded transport needs."""

    framework = "mindspore"

    def shape(self, x: Tensor) -> Shape:
        """Sizes of ``x``."""
        return tuple(x.shape)

    def dtype(self, x: Tensor) -> str:
        """``float32`` and so on."""
        return str(x.dtype).lower()

    def inexact(self, x: Tensor) -> bool:
        """Whether ``x`` is floating or complex."""
        return str(x.dtype).startswith(_INEXACT)

    def device(self, x: Tensor) -> str:
        """Empty: a process of MindSpore has one device, of the same type on all ranks of a world."""
        del x
        return ""


def missing_ascend() -> str:
    """Return why MindSpore cannot compute on Ascend here, and the fix, in one line; empty if it can.

    Nothing is initialised: MindSpore loads its plugin when it is imported; this returns the result.
    """
    context, version = MSContext.get_instance(), mindspore.__version__
    if context.is_pkg_support_device("Ascend"):
        return ""
    if not has_plugin(Path(mindspore.__file__).parent):
        return f"MindSpore {version} is the CPU build: install the one for Ascend"
    why = context.load_plugin_error().partition("failed. ")[2].partition("\n")[0] or "no reason is given"
    return f"MindSpore {version} cannot load its plugin for Ascend ({why}): install CANN, and source its set_env.sh"


def require_devices(ranks: int) -> None:
    """Check that ``ranks`` ranks of MindSpore have a device each, and that MindSpore would compute on them.

    Raises:
        UnsupportedOnBackend: there are fewer devices than ranks, or MindSpore is set to a dry run.
    """
    dry = dry_run(os.environ)
    if dry is not None:
        msg = f"--device npu: {dry[0]}; {dry[1]}"
        raise UnsupportedOnBackend(msg)
    devices = ascend.device_count()
    if not devices:
        msg = (
            f"--device npu: MindSpore sees no device; look at `{TOOLS['npu']}` and at {VISIBLE['npu']}, which may hide "
            "devices, or take --device cpu"
        )
        raise UnsupportedOnBackend(msg)
    if ranks > devices:
        msg = (
            f"--device npu: {ranks} ranks of MindSpore need {ranks} devices, one each, and MindSpore sees {devices}; "
            f"take at most {devices} ranks, look at `{TOOLS['npu']}` and at {VISIBLE['npu']}, which may hide devices, "
            "or take --platform torch, whose ranks share devices"
        )
        raise UnsupportedOnBackend(msg)


def current_device() -> int:
    """Return the number of the device that this process computes on, or would take; nothing is initialised."""
    number: int = mindspore.get_current_device().device_id
    return number


def exact_products() -> None:
    """Compute products of float32 in float32 on Ascend, without HF32, until the process ends.

    Raises:
        UnsupportedOnBackend: the program has allowed HF32, which cannot be undone in MindSpore.
    """
    try:
        ascend.op_precision.matmul_allow_hf32(False)
        ascend.op_precision.conv_allow_hf32(False)
    except RuntimeError as error:
        msg = (
            f"--device npu: this process lets MindSpore round products of float32 to HF32: {error}; leave out "
            "matmul_allow_hf32(True) and conv_allow_hf32(True)"
        )
        raise UnsupportedOnBackend(msg) from error


def start_simulated(inner: SimulatedTransport, device: int) -> NumpyBridge:
    """Begin a simulated rank on a device that all ranks of its world share; its process may have served another run.

    Values travel through host memory, as between simulated ranks on CPU.
    """
    _share_device(device)
    return begin_simulated(inner)


@cache
def _share_device(device: int) -> None:
    """Acquire the device of this process, once."""
    mindspore.set_device("Ascend", device)
    mindspore.runtime.set_memory(init_size=_PART_OF_MEMORY, increase_size=_PART_OF_MEMORY)


def start_world(device: str, rank: int, world_size: int, port: str, store: str) -> HcclTransport:
    """Join a world over HCCL; on CPU, over gloo with the limits of HCCL (a rehearsal).

    Args:
        device: ``npu``, with MindSpore's visible device i for rank i, or ``cpu``.
        rank: number of this rank.
        world_size: number of ranks.
        port: port of the scheduler of MindSpore's cluster, which the ranks join first; empty in rehearsals, which have
            no scheduler.
        store: file for the rendezvous of the ranks of a rehearsal.

    Raises:
        UnsupportedOnBackend: MindSpore cannot compute on Ascend here.
    """
    on_accelerator = device != "cpu"
    why = missing_ascend() if on_accelerator else ""
    if why:
        msg = f"device {device}: {why}, or use --device cpu"
        raise UnsupportedOnBackend(msg)
    if port:
        os.environ.update(rank_environment(rank, world_size, port))
        if on_accelerator:
            mindspore.set_device("Ascend", rank)
        communication.init("hccl" if on_accelerator else "mccl")
    engine: Any = distributed if on_accelerator else RehearsedHccl(_over_gloo(rank, world_size, store))
    return HcclTransport(engine)


def _over_gloo(rank: int, world_size: int, store: str) -> Transport:
    """Return a transport of MindSpore tensors over PyTorch's gloo."""
    from hyper_parallel.transport.real import c10d  # an optional dependency of this rehearsal alone

    compute_on_cpu()
    gloo = c10d.start_gloo(rank, world_size, f"file://{store}")
    return NumpyBridge(gloo, lambda x: c10d.from_host(to_host(x)), lambda y: from_host(c10d.to_host(y)))

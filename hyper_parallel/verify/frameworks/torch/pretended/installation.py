"""Makes the CPU of this process stand in for an accelerator, until the process ends.

Functions of the device (its number, streams, memory, generators) are replaced, and data for it stays in host memory:
tensors and meshes are on ``cpu``, so that PyTorch uses its CPU code paths. Requests to the device are counted for the
report.
"""

from __future__ import annotations

import functools
import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.torch.versions import register_device_module
from hyper_parallel.verify.frameworks.torch.pretended.device import ASKED, PARTS, PretendedDevice, answer_for
from hyper_parallel.verify.frameworks.torch.pretended.placement import replace_placement
from hyper_parallel.verify.frameworks.torch.pretended.ring_attention import offer_ring_attention
from hyper_parallel.verify.frameworks.torch.pretended.stubs import STUBBED, offer_stubs

__all__ = ["asked", "install"]

_INSTALLED: list[str] = []

_ENGINES = ("nccl", "hccl")
"""Communication backends of the devices; a program's groups with one of them use the CPU's backend."""


def install(name: str) -> None:
    """Let the CPU stand in for the device ``name`` in this process from now on; repeated calls do nothing.

    Args:
        name: ``cuda`` or ``npu``.
    """
    if name in _INSTALLED:
        return
    _INSTALLED.append(name)
    device = PretendedDevice(name)
    answer_for(device, torch.cuda if name == "cuda" else _npu())
    replace_placement(device)
    _replace_engines()
    offer_ring_attention()
    offer_stubs()


def asked() -> dict[str, Any]:
    """Return the program's requests to the device so far, by kind, and the packages that were replaced by stubs."""
    return {"device": _INSTALLED[0], "counts": dict(ASKED), "stubs": dict(STUBBED)} if _INSTALLED else {}


def _npu() -> ModuleType:
    """Register ``torch.npu``, and ``torch_npu`` for programs that import it."""
    engine: Any = torch
    if not hasattr(torch, "npu"):
        engine.utils.rename_privateuse1_backend("npu")
        module = ModuleType("torch.npu")
        engine._C._get_accelerator = lambda *_: torch.device("cpu")  # noqa: SLF001 - C++ has no hooks of the renamed device
        for part in PARTS:
            inner = ModuleType(f"torch.npu.{part}")
            vars(inner).update(
                {name: None for name in dir(PretendedDevice) if hasattr(getattr(torch.cuda, part), name)}
            )
            setattr(module, part, inner)
        register_device_module("npu", module)
        sys.modules["torch.npu"] = module
    package: Any = ModuleType("torch_npu")
    package.__spec__, package.npu, package.__version__ = ModuleSpec("torch_npu", None), engine.npu, torch.__version__
    sys.modules.setdefault("torch_npu", package)
    found: ModuleType = engine.npu
    return found


def _replace_engines() -> None:
    """Permanently replace the functions of ``torch.distributed`` that take a device or its backend in this process.

    Split sizes that a program computes on the device and copies to the host are on the host already.
    """
    for name in ("init_process_group", "new_group", "split_group", "barrier", "all_to_all_single"):
        _replace_engine_of(name)


def _replace_engine_of(name: str) -> None:
    plain: Any = getattr(distributed_c10d, name)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        backend = str(given.get("backend") or "").lower()
        if any(engine in backend for engine in _ENGINES):
            ASKED[f"groups of {backend}"] += 1
            given["backend"] = "gloo"
        for device in ("device_id", "device_ids"):
            if device in given:
                given[device] = signature.parameters[device].default
        for sizes in ("output_split_sizes", "input_split_sizes"):
            if isinstance(given.get(sizes), torch.Tensor):
                given[sizes] = given[sizes].tolist()
        return plain(*bound.args, **bound.kwargs)

    setattr(distributed_c10d, name, call)
    setattr(dist, name, call)

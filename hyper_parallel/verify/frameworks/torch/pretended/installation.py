"""Makes the CPU of this process stand in for an accelerator, until the process ends.

What programs ask of the device (its number, streams, memory, generators) is answered, and what they put on it stays in
the memory of the host: tensors and meshes are of ``cpu``, so that PyTorch takes its own paths for the CPU. What was
asked is counted for the report.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from hyper_parallel.platform.torch.versions import register_device_module
from hyper_parallel.verify.frameworks.torch.pretended.device import ASKED, PARTS, PretendedDevice, answer_for
from hyper_parallel.verify.frameworks.torch.pretended.engines import replace_engines
from hyper_parallel.verify.frameworks.torch.pretended.placement import replace_placement
from hyper_parallel.verify.frameworks.torch.pretended.ring_attention import offer_ring_attention
from hyper_parallel.verify.frameworks.torch.pretended.stubs import STUBBED, offer_stubs

__all__ = ["asked", "install"]


_INSTALLED: list[str] = []


def install(name: str) -> None:
    """Let the CPU stand in for the device ``name`` in this process from now on; does nothing the second time.

    Args:
        name: ``cuda`` or ``npu``.
    """
    if name in _INSTALLED:
        return
    _INSTALLED.append(name)
    device = PretendedDevice(name)
    answer_for(device, torch.cuda if name == "cuda" else _npu())
    replace_placement(device)
    replace_engines()
    offer_ring_attention()
    offer_stubs()


def asked() -> dict[str, Any]:
    """Return what the program has asked of the device so far, by kind, and which packages were replaced by stubs."""
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

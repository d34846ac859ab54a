"""Makes the CPU of this process stand in for an accelerator, until the process ends.

The functions of the device's module (for device numbers, streams, memory, generators) are replaced. Data for the device
stays in host memory: tensors and meshes are on ``cpu``, so that PyTorch uses its CPU code paths. The program's requests
to the device are counted for the report.
"""

from __future__ import annotations

import functools
import inspect
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.torch.versions import register_device_module
from hyper_parallel.verify.frameworks.torch.pretended.device import ASKED, PARTS, Lacked, PretendedDevice, answer_for
from hyper_parallel.verify.frameworks.torch.pretended.placement import Placement, replace_placement
from hyper_parallel.verify.frameworks.torch.pretended.ring_attention import offer_ring_attention
from hyper_parallel.verify.frameworks.torch.pretended.stubs import STUBBED, offer_stubs
from hyper_parallel.verify.frameworks.torch.pretended.sync_batchnorm import offer_sync_batchnorm

__all__ = ["asked", "install"]

_INSTALLED: list[str] = []
_PRETENDED: list[tuple[PretendedDevice, Placement]] = []


class ProcessGroupNCCL:
    """Stands for the class of NCCL's process groups; programs pass its ``Options``, which are ignored."""

    class Options:
        """Options of a process group, given by name."""

        def __init__(self, *_: Any, **options: Any) -> None:
            ASKED["options of groups"] += 1
            vars(self).update(options)


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
    module = torch.cuda if name == "cuda" else _npu()
    if _PRETENDED:  # a second name, such as ``cuda`` for a pretended ``npu``
        device, placed = _PRETENDED[0]
        answer_for(device, module)
        placed.offer(name)
        return
    device = PretendedDevice(name)
    answer_for(device, module)
    _PRETENDED.append((device, replace_placement(device)))
    _replace_engines()
    offer_ring_attention()
    offer_sync_batchnorm()
    offer_stubs()


def asked() -> dict[str, Any]:
    """Return the program's requests to the device so far, by kind, and the packages that were replaced by stubs."""
    return {"device": _INSTALLED[0], "counts": dict(ASKED), "stubs": dict(STUBBED)} if _INSTALLED else {}


def _npu() -> ModuleType:
    """Register ``torch.npu``, and ``torch_npu`` for programs that import it."""
    engine: Any = torch
    if not hasattr(torch, "npu"):
        engine.utils.rename_privateuse1_backend("npu")
        module: Any = ModuleType("torch.npu")
        engine._C._get_accelerator = lambda *_: torch.device("cpu")  # noqa: SLF001 - C++ has no such device
        for part in PARTS:
            inner = ModuleType(f"torch.npu.{part}")
            vars(inner).update(
                {name: None for name in dir(PretendedDevice) if hasattr(getattr(torch.cuda, part), name)}
            )
            setattr(module, part, inner)
        register_device_module("npu", module)
        sys.modules["torch.npu"] = module
        module.amp = _precision()
        module.config = SimpleNamespace(allow_internal_format=False)
        module.set_compile_mode = lambda **_: None
        module.set_option = lambda _: None
    package: Any = ModuleType("torch_npu")
    package.__spec__, package.npu, package.__version__ = ModuleSpec("torch_npu", None), engine.npu, torch.__version__
    package.__path__, package.__getattr__ = [], _function_of_npu
    sys.modules.setdefault("torch_npu", package)
    contrib: Any = ModuleType("torch_npu.contrib")
    contrib.__path__ = []
    sys.modules |= {"torch_npu.npu": engine.npu, "torch_npu.npu.amp": engine.npu.amp, "torch_npu.contrib": contrib}
    sys.meta_path.append(_Transfer())
    found: ModuleType = engine.npu
    return found


def _precision() -> ModuleType:
    """Return ``torch.npu.amp``."""
    amp: Any = ModuleType("torch.npu.amp")
    amp.GradScaler, amp.autocast = partial(torch.amp.GradScaler, "npu"), partial(torch.autocast, "npu")
    amp.custom_fwd, amp.custom_bwd = (
        partial(each, device_type="npu") for each in (torch.amp.custom_fwd, torch.amp.custom_bwd)
    )
    sys.modules["torch.npu.amp"] = amp
    return amp


def _function_of_npu(name: str) -> Any:
    """Return a placeholder for a fused function of ``torch_npu``; calling it is an error.

    Raises:
        AttributeError: ``torch_npu`` has no fused function of this name.
    """
    if name.startswith("npu_"):
        return Lacked(f"torch_npu.{name}", "call PyTorch's own functions, such as scaled_dot_product_attention")
    msg = f"module 'torch_npu' has no attribute {name!r} when the CPU replaces the device (docs/stacks.md)"
    raise AttributeError(msg)


class _Transfer:
    """Finds ``torch_npu.contrib.transfer_to_npu``, whose import makes ``cuda`` mean the NPU in a script."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec, or None for another name."""
        del path, target
        return ModuleSpec(name, self) if name == "torch_npu.contrib.transfer_to_npu" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Let the CPU stand in for ``cuda`` as well."""
        del module
        install("cuda")


def _replace_engines() -> None:
    """Replace the functions of ``torch.distributed`` that take a device or its backend, until this process ends.

    Split sizes that a program passes as a tensor become a list.
    """
    for name in ("init_process_group", "new_group", "split_group", "barrier", "all_to_all_single"):
        _replace_engine_of(name)
    offered: Any = dist
    offered.ProcessGroupNCCL = ProcessGroupNCCL  # as in CUDA builds, but gloo ignores its options


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
        if isinstance(given.get("pg_options"), ProcessGroupNCCL.Options):
            given["pg_options"] = None
        for device in ("device_id", "device_ids"):
            if device in given:
                given[device] = signature.parameters[device].default
        for sizes in ("output_split_sizes", "input_split_sizes"):
            if isinstance(given.get(sizes), torch.Tensor):
                given[sizes] = given[sizes].tolist()
        return plain(*bound.args, **bound.kwargs)

    setattr(distributed_c10d, name, call)
    setattr(dist, name, call)

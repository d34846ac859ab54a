"""Parameters on the meta device, and their materialisation: each rank allocates and fills its own shards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.dtensor import DTensor, to_local
from hyper_parallel.errors import PlanError

__all__ = ["materialise", "parameters_on"]


@contextmanager
def parameters_on(device: torch.device) -> Iterator[None]:
    """Inside this context, parameters that this thread registers are moved to ``device``; buffers are not."""
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, value: Any) -> Any:
        del module, name
        if value is None or threading.get_ident() != thread or value.device == device:
            return None
        return type(value)(value.to(device), requires_grad=value.requires_grad)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def materialise(module: nn.Module, stage_index: int) -> None:
    """Allocate every meta parameter and buffer, and let their modules fill them.

    Raises:
        PlanError: a module with such parameters has no ``reset_parameters``.
    """
    owners = [(path, owner) for path, owner in module.named_modules() if _delayed(owner)]
    if silent := [path or type(owner).__name__ for path, owner in owners if not hasattr(owner, "reset_parameters")]:
        msg = (
            f"init_parameters: {', '.join(silent)} {'has' if len(silent) == 1 else 'have'} delayed parameters or "
            f"buffers and no reset_parameters() that fills them; add one"
        )
        raise PlanError(msg)
    allocated: dict[int, Any] = {}  # a shared parameter stays one
    for submodule in module.modules():
        _replace(submodule, allocated)
    with _stage(stage_index):
        for _, owner in owners:
            owner.reset_parameters()


def _replace(module: nn.Module, allocated: dict[int, Any]) -> None:
    for tensors in (module._parameters, module._buffers):
        for name, value in tensors.items():
            if value is not None and to_local(value).is_meta:
                if id(value) not in allocated:
                    allocated[id(value)] = _with_storage(value)
                tensors[name] = allocated[id(value)]


def _with_storage(value: Any) -> Any:
    local = to_local(value)
    device = value.device_mesh.device_type if isinstance(value, DTensor) else _default_device()
    fresh = torch.empty(local.shape, dtype=local.dtype, device=device)
    tensor = value._platform.wrap(fresh, value.layout) if isinstance(value, DTensor) else fresh
    return nn.Parameter(tensor, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else tensor


def _default_device() -> torch.device:
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def _delayed(module: nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and to_local(tensor).is_meta for tensor in tensors)


@contextmanager
def _stage(stage_index: int) -> Iterator[None]:
    """Seed each pipeline stage differently; the first stage uses the program's seed."""
    if not stage_index:
        yield
        return
    seed, calls = random.get_rng_state()
    with random.preserve_state(), torch.random.fork_rng():
        random.set_rng_state((seed + stage_index, calls))
        torch.manual_seed(torch.initial_seed() + stage_index)
        yield

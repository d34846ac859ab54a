"""Parameters without storage, and the moment at which every rank gives its own pieces theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import PlanError

__all__ = ["materialise", "parameters_on"]


@contextmanager
def parameters_on(device: torch.device) -> Iterator[None]:
    """Parameters that this thread registers inside are moved to ``device``; buffers stay where they are made."""
    here = threading.get_ident()

    def move(module: nn.Module, name: str, value: Any) -> Any:
        del module, name
        if value is None or threading.get_ident() != here or value.device == device:
            return None
        return type(value)(value.to(device), requires_grad=value.requires_grad)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def materialise(module: nn.Module, stage_index: int) -> None:
    """Give every meta parameter and buffer storage, and let their modules fill them."""
    homes = [(path, one) for path, one in module.named_modules() if _delayed(one)]
    if silent := [path or type(one).__name__ for path, one in homes if not hasattr(one, "reset_parameters")]:
        msg = (
            f"init_parameters: {', '.join(silent)} {'has' if len(silent) == 1 else 'have'} delayed parameters or "
            f"buffers and no reset_parameters() that fills them; add one"
        )
        raise PlanError(msg)
    made: dict[int, Any] = {}
    for _, one in module.named_modules():
        _replace(one, made)
    with _stage(stage_index):
        for _, one in homes:
            one.reset_parameters()


def _replace(module: nn.Module, made: dict[int, Any]) -> None:
    for held in (module._parameters, module._buffers):  # noqa: SLF001 - no public spelling
        for name, value in held.items():
            if value is not None and _local(value).is_meta:
                if id(value) not in made:
                    made[id(value)] = _with_storage(value)
                held[name] = made[id(value)]


def _with_storage(value: Any) -> Any:
    local = _local(value)
    where = value.device_mesh.device_type if isinstance(value, DTensor) else _default_device()
    fresh = torch.empty(local.shape, dtype=local.dtype, device=where)
    whole = value._platform.wrap(fresh, value.layout) if isinstance(value, DTensor) else fresh
    return nn.Parameter(whole, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else whole


def _default_device() -> torch.device:
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def _delayed(module: nn.Module) -> bool:
    held = [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001 - no public spelling
    return any(one is not None and _local(one).is_meta for one in held)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


@contextmanager
def _stage(stage_index: int) -> Iterator[None]:
    """Later stages draw from seeds of their own; the first one goes on with the program's."""
    if not stage_index:
        yield
        return
    seed, calls = random.get_state()
    with random.preserved(), torch.random.fork_rng():
        random.set_state((seed + stage_index, calls))
        torch.manual_seed(torch.initial_seed() + stage_index)
        yield

"""Lets programs name the device's engine of communication: groups are those of the CPU."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.verify.frameworks.torch.pretended.device import ASKED

__all__ = ["replace_engines"]

_ENGINES = ("nccl", "hccl")


def replace_engines() -> None:
    """Replace the functions of ``torch.distributed`` that take a device or its engine, in this process, for good.

    Sizes of an exchange that a program counts on the device, and would copy to the host, are on the host already.
    """
    for name in ("init_process_group", "new_group", "split_group", "barrier", "all_to_all_single"):
        _replace(name)


def _replace(name: str) -> None:
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

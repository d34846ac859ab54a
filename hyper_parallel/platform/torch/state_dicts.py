"""``torch.distributed.checkpoint.state_dict`` over modules of this library: complete values, and shards of them.

PyTorch's functions gather and distribute PyTorch's DTensors only. When they gather, they would return DTensors of this
library unchanged; when they distribute, they would replace them with complete tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.platform.torch.dtensor import wrap

__all__ = [
    "broadcasting_to_shards",
    "distributing_to_shards",
    "gathering_dtensors",
    "going_into_dtensors",
    "staging_dtensors",
]

Call = Callable[..., Any]


def gathering_dtensors(gather: Call) -> Call:
    """Make the function that returns complete tensors gather DTensors of this library, too."""

    @wraps(gather)
    def whole(state_dict: dict[str, Any], **options: Any) -> Any:
        ranks = options.get("ranks_only", ())
        keeps = not ranks or dist.get_rank(options.get("pg")) in ranks
        return gather(_whole(state_dict, keeps=keeps, to_host=options.get("cpu_offload", False)), **options)

    return whole


def _whole(value: Any, *, keeps: bool, to_host: bool) -> Any:
    """``value`` with complete tensors instead of DTensors, or None where this rank keeps none."""
    if isinstance(value, DTensor):
        tensor = value.detach().full_tensor()
        if not keeps:
            return None
        return tensor.cpu() if to_host else tensor
    if isinstance(value, dict):
        return {key: _whole(item, keeps=keeps, to_host=to_host) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_whole(item, keeps=keeps, to_host=to_host) for item in value)
    return value


def distributing_to_shards(distribute: Call) -> Call:
    """Make the function that assigns each rank's values to DTensors assign shards of the first rank's values."""

    @wraps(distribute)
    def shards(full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        before = _dtensors(local_state_dict)
        distribute(full_state_dict, local_state_dict, *args, **options)
        _shard(before, local_state_dict, source=0)

    return shards


def broadcasting_to_shards(broadcast: Call) -> Call:
    """Make the function that assigns the first rank's values to DTensors assign shards of them."""

    @wraps(broadcast)
    def shards(full_state_dict: Any, local_state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        before = _dtensors(local_state_dict)
        broadcast(full_state_dict, local_state_dict, *args, **options)
        _shard(before, local_state_dict, source=None)

    return shards


def going_into_dtensors(iterate: Call) -> Call:
    """Make the function that copies tensors of nested values copy the local tensors of DTensors."""

    @wraps(iterate)
    def copied(iter_object: Any, *functions: Any, **options: Any) -> Any:
        if not isinstance(iter_object, DTensor):
            return iterate(iter_object, *functions, **options)
        companion = options.get("companion_obj")
        if isinstance(companion, DTensor):
            iterate(iter_object.to_local(), *functions, **{**options, "companion_obj": companion.to_local()})
            return companion
        local = iterate(iter_object.detach().to_local(), *functions, **options)
        return wrap(local, iter_object.layout) if isinstance(local, torch.Tensor) else local

    return copied


def staging_dtensors(offload: Call) -> Call:
    """Make the function that copies a tensor's storage, for ``async_save``, copy that of a DTensor's local tensor."""

    @wraps(offload)
    def staged(self: Any, x: Any, memo: dict[int, Any], *args: Any, **options: Any) -> Any:
        if not isinstance(x, DTensor):
            return offload(self, x, memo, *args, **options)
        memo[id(x)] = copy = wrap(offload(self, x.detach().to_local(), memo, *args, **options), x.layout)
        return copy

    return staged


def _dtensors(state: Mapping[str, Any]) -> dict[str, DTensor]:
    return {key: value for key, value in state.items() if isinstance(value, DTensor)}


def _shard(before: dict[str, DTensor], state: dict[str, Any], *, source: int | None) -> None:
    """Distribute the complete tensors that have replaced DTensors; loading refuses those of the wrong shape."""
    for key, own in before.items():
        value = state.get(key)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == own.shape:
            state[key] = distribute_tensor(value.detach(), own.device_mesh, own.layout, src_data_rank=source)

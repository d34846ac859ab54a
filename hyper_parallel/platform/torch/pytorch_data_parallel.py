"""PyTorch's own data parallelism over modules and meshes of this library: DTensors are refused, meshes are accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.torch.interop import torch_mesh
from hyper_parallel.transport.host.torch.ops import reduce_in_order

__all__ = ["constructor_without_dtensors", "managed_without_dtensors", "rank_order_hook", "with_their_mesh"]


Call = Callable[..., Any]


def _refuse_dtensor(function: str, name: str, parameter: Any, instead: str) -> None:
    if isinstance(parameter, DTensor):
        msg = (
            f"PyTorch's {function} does not know parameter {name}, a DTensor "
            f"{parameter.layout.notation(parameter.dtype)} of hyper_parallel; use {instead} of hyper_parallel, with "
            "the data axis of one mesh whose other axes are those of tensor parallelism"
        )
        raise PlanError(msg)


def constructor_without_dtensors(init: Call) -> Call:
    """The constructor of a wrapper, which refuses modules with DTensors and takes ``device_mesh`` of this library."""

    @wraps(init)
    def construct(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kind = init.__qualname__.partition(".")[0]
        instead = "replicate(module, mesh)" if kind == "DistributedDataParallel" else "fully_shard(module, mesh=mesh)"
        for name, parameter in module.named_parameters():
            _refuse_dtensor(kind, name, parameter, instead)
        if isinstance(kwargs.get("device_mesh"), DeviceMesh):
            kwargs["device_mesh"] = torch_mesh(kwargs["device_mesh"])
        init(self, module, *args, **kwargs)

    return construct


def managed_without_dtensors(verify: Call) -> Call:
    """``fully_shard``'s check of one parameter, which refuses a DTensor."""

    @wraps(verify)
    def call(name: str, param: Any) -> None:
        _refuse_dtensor("fully_shard", name, param, "fully_shard(module, mesh=mesh)")
        verify(name, param)

    return call


def with_their_mesh(mesh_info: Call) -> Call:
    """Let ``fully_shard`` accept a mesh of this library."""

    @wraps(mesh_info)
    def call(mesh: Any, *args: Any, **kwargs: Any) -> Any:
        return mesh_info(torch_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh, *args, **kwargs)

    return call


def rank_order_hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in the order of the ranks, bit-equal in every engine and every bucket.

    Give it to DDP: ``model.register_comm_hook(None, rank_order_hook)``. It gathers the gradients of all ranks, so on n
    ranks it sends n / 2 times as much as an all-reduce.

    Args:
        group: the process group that DDP was given; None means all ranks.
        bucket: DDP's flat gradients.

    Returns:
        a future of the averaged gradients, in new memory.
    """
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    work: Any = dist.all_gather(parts, own, group=group, async_op=True)
    gathered: torch.futures.Future[Any] = work.get_future()
    return gathered.then(lambda _: reduce_in_order(parts, "avg"))


# DDP compares the annotations themselves, which are strings in this module.
rank_order_hook.__annotations__.update(bucket=vars(dist)["GradBucket"])
del rank_order_hook.__annotations__["return"]

"""``fully_shard`` with the arguments and methods of another release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from hyper_parallel.core.data_parallel import sharding
from hyper_parallel.core.data_parallel.policy import MixedPrecisionPolicy
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.errors import UnsupportedOnBackend

__all__ = ["CPUOffloadPolicy", "HSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]

ModuleT = TypeVar("ModuleT")


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards are in host memory between uses."""


class HSDPModule:
    """A base of the class of every module that ``fully_shard`` was applied to."""


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Any = None,
    replicate_params: Any = None,
    comm_fusion: bool = False,
) -> ModuleT:
    """Shard the parameters of ``module``; see :func:`hyper_parallel.fully_shard`. Its class becomes an HSDPModule.

    Args:
        module: the module, which is changed in place.
        mesh: the data axis, or the axis of replicas and the data axis.
        reshard_after_forward: free the gathered parameters after forward.
        shard_placement_fn: not supported.
        mp_policy: dtypes in which to compute and reduce.
        offload_policy: where shards are; only :class:`OffloadPolicy` is supported.
        ignored_params: not supported, unless empty.
        replicate_params: not supported, unless empty.
        comm_fusion: whether parameters of one module travel together, which they always do.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) an argument that is not supported.
    """
    del comm_fusion
    refused = {
        "shard_placement_fn": shard_placement_fn,
        "offload_policy": offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None,
        "ignored_params": ignored_params,
        "replicate_params": replicate_params,
    }
    given = [name for name, value in refused.items() if value]
    if given:
        msg = f"fully_shard: {', '.join(given)} is not supported; leave it out"
        raise UnsupportedOnBackend(msg)
    sharding.fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy)
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls, HSDPModule), {"__module__": cls.__module__})
    return module

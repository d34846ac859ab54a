"""Data parallelism: parameters, gradients and optimizer state sharded over a data axis. Names are imported lazily.

Importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.accumulation import (
        global_mean as global_mean,
        no_sync as no_sync,
        set_requires_gradient_sync as set_requires_gradient_sync,
    )
    from hyper_parallel.core.data_parallel.meshes import (
        DataParallelMeshDims as DataParallelMeshDims,
        FSDPMeshInfo as FSDPMeshInfo,
        HSDPMeshInfo as HSDPMeshInfo,
        ShardPlacementResult as ShardPlacementResult,
    )
    from hyper_parallel.core.data_parallel.methods import (
        FSDPModule as FSDPModule,
        UnshardHandle as UnshardHandle,
        register_fsdp_forward_method as register_fsdp_forward_method,
        share_comm_ctx as share_comm_ctx,
    )
    from hyper_parallel.core.data_parallel.policy import (
        CPUOffloadPolicy as CPUOffloadPolicy,
        MixedPrecisionPolicy as MixedPrecisionPolicy,
        OffloadPolicy as OffloadPolicy,
    )
    from hyper_parallel.core.data_parallel.replication import replicate as replicate
    from hyper_parallel.core.data_parallel.sharding import fully_shard as fully_shard

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.data_parallel.accumulation": ("global_mean", "no_sync", "set_requires_gradient_sync"),
        "hyper_parallel.core.data_parallel.meshes": (
            "DataParallelMeshDims",
            "FSDPMeshInfo",
            "HSDPMeshInfo",
            "ShardPlacementResult",
        ),
        "hyper_parallel.core.data_parallel.methods": (
            "FSDPModule",
            "UnshardHandle",
            "register_fsdp_forward_method",
            "share_comm_ctx",
        ),
        "hyper_parallel.core.data_parallel.policy": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"),
        "hyper_parallel.core.data_parallel.replication": ("replicate",),
        "hyper_parallel.core.data_parallel.sharding": ("fully_shard",),
    },
)

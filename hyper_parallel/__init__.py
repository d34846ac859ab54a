"""Distributed tensors with one API over PyTorch and MindSpore. Importing this imports neither framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports
from hyper_parallel.compat.paths import install

if TYPE_CHECKING:
    from hyper_parallel._caches import cache_info as cache_info
    from hyper_parallel._release import __version__ as __version__
    from hyper_parallel.core.checkpoint import load as load, save as save
    from hyper_parallel.core.context_parallel import (
        balanced_order as balanced_order,
        context_parallel_attention as context_parallel_attention,
    )
    from hyper_parallel.core.data_parallel import (
        CPUOffloadPolicy as CPUOffloadPolicy,
        DataParallelMeshDims as DataParallelMeshDims,
        FSDPMeshInfo as FSDPMeshInfo,
        FSDPModule as FSDPModule,
        HSDPMeshInfo as HSDPMeshInfo,
        MixedPrecisionPolicy as MixedPrecisionPolicy,
        OffloadPolicy as OffloadPolicy,
        ShardPlacementResult as ShardPlacementResult,
        UnshardHandle as UnshardHandle,
        fully_shard as fully_shard,
        global_mean as global_mean,
        no_sync as no_sync,
        register_fsdp_forward_method as register_fsdp_forward_method,
        replicate as replicate,
        set_requires_gradient_sync as set_requires_gradient_sync,
        share_comm_ctx as share_comm_ctx,
    )
    from hyper_parallel.core.dtensor import (
        DeviceMesh as DeviceMesh,
        DTensor as DTensor,
        Event as Event,
        EventLog as EventLog,
        Layout as Layout,
        Partial as Partial,
        Placement as Placement,
        Replicate as Replicate,
        Shard as Shard,
        SkipDTensorDispatch as SkipDTensorDispatch,
        StridedShard as StridedShard,
        defer_grad_reduce as defer_grad_reduce,
        distribute_module as distribute_module,
        distribute_tensor as distribute_tensor,
        empty as empty,
        full as full,
        get_current_mesh as get_current_mesh,
        get_rng_state as get_rng_state,
        implicit_budget as implicit_budget,
        init_device_mesh as init_device_mesh,
        manual_seed as manual_seed,
        ones as ones,
        rand as rand,
        randn as randn,
        record_events as record_events,
        set_rng_state as set_rng_state,
        strict as strict,
        use_deterministic as use_deterministic,
        zeros as zeros,
    )
    from hyper_parallel.core.expert_parallel import (
        load_balancing_loss as load_balancing_loss,
        routed_experts as routed_experts,
        router_z_loss as router_z_loss,
    )
    from hyper_parallel.core.shard import (
        DFunction as DFunction,
        DistributedOp as DistributedOp,
        ReplicatedOp as ReplicatedOp,
        ShardingPlan as ShardingPlan,
        ShardingPropagator as ShardingPropagator,
        compile as compile,  # noqa: A004 - as torch.compile
        custom_shard as custom_shard,
        implicit_replication as implicit_replication,
        local_map as local_map,
        shard_module as shard_module,
    )
    from hyper_parallel.core.tensor_parallel import (
        ColwiseParallel as ColwiseParallel,
        ExpertParallel as ExpertParallel,
        HeadNorm as HeadNorm,
        LatentKV as LatentKV,
        NoParallel as NoParallel,
        ParallelStyle as ParallelStyle,
        PrepareModuleInput as PrepareModuleInput,
        PrepareModuleInputOutput as PrepareModuleInputOutput,
        PrepareModuleOutput as PrepareModuleOutput,
        ReplicateKV as ReplicateKV,
        RowwiseParallel as RowwiseParallel,
        SequenceParallel as SequenceParallel,
        clip_grad_norm_ as clip_grad_norm_,
        complete_plan as complete_plan,
        input_reshard as input_reshard,
        loss_parallel as loss_parallel,
        parallelize_module as parallelize_module,
    )
    from hyper_parallel.platform.select import (
        get_mindspore_platform as get_mindspore_platform,
        get_platform as get_platform,
        get_torch_platform as get_torch_platform,
        value_and_grad as value_and_grad,
    )

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.data_parallel": None,
        "hyper_parallel.core.dtensor": (
            "DTensor",
            "DeviceMesh",
            "Event",
            "EventLog",
            "Layout",
            "Partial",
            "Placement",
            "Replicate",
            "Shard",
            "SkipDTensorDispatch",
            "StridedShard",
            "defer_grad_reduce",
            "distribute_module",
            "distribute_tensor",
            "empty",
            "full",
            "get_current_mesh",
            "get_rng_state",
            "implicit_budget",
            "init_device_mesh",
            "manual_seed",
            "ones",
            "rand",
            "randn",
            "record_events",
            "set_rng_state",
            "strict",
            "use_deterministic",
            "zeros",
        ),
        "hyper_parallel.core.context_parallel": ("balanced_order", "context_parallel_attention"),
        "hyper_parallel.core.expert_parallel": ("load_balancing_loss", "routed_experts", "router_z_loss"),
        "hyper_parallel.core.shard": (
            "DFunction",
            "DistributedOp",
            "ReplicatedOp",
            "ShardingPlan",
            "ShardingPropagator",
            "compile",
            "custom_shard",
            "implicit_replication",
            "local_map",
            "shard_module",
        ),
        "hyper_parallel.core.tensor_parallel": None,
        "hyper_parallel._caches": ("cache_info",),
        "hyper_parallel._release": ("__version__",),
        "hyper_parallel.core.checkpoint": ("load", "save"),
        "hyper_parallel.platform.select": (
            "get_mindspore_platform",
            "get_platform",
            "get_torch_platform",
            "value_and_grad",
        ),
    },
)

install()

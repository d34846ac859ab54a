"""Sharding rules and dispatch. Names are imported lazily; importing this package imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import implicit_budget, record_events, strict
    from hyper_parallel.core.shard.compiled import compile  # noqa: A004 - as torch.compile
    from hyper_parallel.core.shard.custom.dfunction import DFunction, ReplicatedOp
    from hyper_parallel.core.shard.custom.distributed_op import DistributedOp
    from hyper_parallel.core.shard.custom.function_map import custom_shard, local_map
    from hyper_parallel.core.shard.custom.schema import (
        OpInfo,
        OpSchema,
        OpSpec,
        OpStrategy,
        OutputSharding,
        RuntimeSchemaInfo,
        TensorMeta,
        TupleStrategy,
    )
    from hyper_parallel.core.shard.custom.sharding_plan import ShardingPlan, shard_module
    from hyper_parallel.core.shard.custom.strategy_api import ShardingPropagator
    from hyper_parallel.core.shard.dispatch import implicit_replication

__all__ = [
    "DFunction",
    "DistributedOp",
    "OpInfo",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "ReplicatedOp",
    "RuntimeSchemaInfo",
    "ShardingPlan",
    "ShardingPropagator",
    "TensorMeta",
    "TupleStrategy",
    "compile",
    "custom_shard",
    "implicit_budget",
    "implicit_replication",
    "local_map",
    "record_events",
    "shard_module",
    "strict",
]

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.dtensor.events": ("implicit_budget", "record_events", "strict"),
        "hyper_parallel.core.shard.custom.dfunction": ("DFunction", "ReplicatedOp"),
        "hyper_parallel.core.shard.compiled": ("compile",),
        "hyper_parallel.core.shard.dispatch": ("implicit_replication",),
        "hyper_parallel.core.shard.custom.distributed_op": ("DistributedOp",),
        "hyper_parallel.core.shard.custom.function_map": ("custom_shard", "local_map"),
        "hyper_parallel.core.shard.custom.strategy_api": ("ShardingPropagator",),
        "hyper_parallel.core.shard.custom.schema": (
            "OpInfo",
            "OpSchema",
            "OpSpec",
            "OpStrategy",
            "OutputSharding",
            "RuntimeSchemaInfo",
            "TensorMeta",
            "TupleStrategy",
        ),
        "hyper_parallel.core.shard.custom.sharding_plan": ("ShardingPlan", "shard_module"),
    },
)

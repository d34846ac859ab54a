"""Distributed tensors with one API over PyTorch and MindSpore. Importing this imports neither framework."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.dtensor.events import Event, EventLog, implicit_budget, record_events, strict
    from hyper_parallel.core.dtensor.factories import empty, full, ones, rand, randn, zeros
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh, get_current_mesh, init_device_mesh
    from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
    from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
    from hyper_parallel.core.dtensor.random import manual_seed
    from hyper_parallel.core.shard.dfunction import DFunction
    from hyper_parallel.core.shard.dispatch import implicit_replication
    from hyper_parallel.core.shard.distributed_op import DistributedOp
    from hyper_parallel.core.tensor_parallel.clip import clip_grad_norm_
    from hyper_parallel.core.tensor_parallel.loss import loss_parallel
    from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
    from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
    from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.no_parallel import NoParallel
    from hyper_parallel.core.tensor_parallel.styles.prepare_input import PrepareModuleInput
    from hyper_parallel.core.tensor_parallel.styles.prepare_input_output import PrepareModuleInputOutput
    from hyper_parallel.core.tensor_parallel.styles.prepare_output import PrepareModuleOutput
    from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel
    from hyper_parallel.platform.select import get_mindspore_platform, get_platform, get_torch_platform

_HOMES = {
    "ColwiseParallel": "hyper_parallel.core.tensor_parallel.styles.colwise",
    "DFunction": "hyper_parallel.core.shard.dfunction",
    "DTensor": "hyper_parallel.core.dtensor.dtensor",
    "DeviceMesh": "hyper_parallel.core.dtensor.mesh",
    "DistributedOp": "hyper_parallel.core.shard.distributed_op",
    "Event": "hyper_parallel.core.dtensor.events",
    "EventLog": "hyper_parallel.core.dtensor.events",
    "Layout": "hyper_parallel.core.dtensor.layout",
    "NoParallel": "hyper_parallel.core.tensor_parallel.styles.no_parallel",
    "ParallelStyle": "hyper_parallel.core.tensor_parallel.styles.base",
    "Partial": "hyper_parallel.core.dtensor.placements",
    "Placement": "hyper_parallel.core.dtensor.placements",
    "PrepareModuleInput": "hyper_parallel.core.tensor_parallel.styles.prepare_input",
    "PrepareModuleInputOutput": "hyper_parallel.core.tensor_parallel.styles.prepare_input_output",
    "PrepareModuleOutput": "hyper_parallel.core.tensor_parallel.styles.prepare_output",
    "Replicate": "hyper_parallel.core.dtensor.placements",
    "RowwiseParallel": "hyper_parallel.core.tensor_parallel.styles.rowwise",
    "SequenceParallel": "hyper_parallel.core.tensor_parallel.styles.sequence",
    "Shard": "hyper_parallel.core.dtensor.placements",
    "StridedShard": "hyper_parallel.core.dtensor.placements",
    "clip_grad_norm_": "hyper_parallel.core.tensor_parallel.clip",
    "distribute_module": "hyper_parallel.core.dtensor.module",
    "distribute_tensor": "hyper_parallel.core.dtensor.module",
    "empty": "hyper_parallel.core.dtensor.factories",
    "full": "hyper_parallel.core.dtensor.factories",
    "get_current_mesh": "hyper_parallel.core.dtensor.mesh",
    "get_mindspore_platform": "hyper_parallel.platform.select",
    "get_platform": "hyper_parallel.platform.select",
    "get_torch_platform": "hyper_parallel.platform.select",
    "implicit_budget": "hyper_parallel.core.dtensor.events",
    "implicit_replication": "hyper_parallel.core.shard.dispatch",
    "init_device_mesh": "hyper_parallel.core.dtensor.mesh",
    "loss_parallel": "hyper_parallel.core.tensor_parallel.loss",
    "manual_seed": "hyper_parallel.core.dtensor.random",
    "ones": "hyper_parallel.core.dtensor.factories",
    "parallelize_module": "hyper_parallel.core.tensor_parallel.parallelize",
    "rand": "hyper_parallel.core.dtensor.factories",
    "randn": "hyper_parallel.core.dtensor.factories",
    "record_events": "hyper_parallel.core.dtensor.events",
    "strict": "hyper_parallel.core.dtensor.events",
    "zeros": "hyper_parallel.core.dtensor.factories",
}

__all__ = [
    "ColwiseParallel",
    "DFunction",
    "DTensor",
    "DeviceMesh",
    "DistributedOp",
    "Event",
    "EventLog",
    "Layout",
    "NoParallel",
    "ParallelStyle",
    "Partial",
    "Placement",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "StridedShard",
    "clip_grad_norm_",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "get_current_mesh",
    "get_mindspore_platform",
    "get_platform",
    "get_torch_platform",
    "implicit_budget",
    "implicit_replication",
    "init_device_mesh",
    "loss_parallel",
    "manual_seed",
    "ones",
    "parallelize_module",
    "rand",
    "randn",
    "record_events",
    "strict",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})

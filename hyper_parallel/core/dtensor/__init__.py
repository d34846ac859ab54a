"""Distributed tensors: meshes, placements, layouts, redistribution.

Names are imported lazily; importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.deferred_gradients import defer_grad_reduce
    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.dtensor.events import Event, EventLog, implicit_budget, record_events, strict
    from hyper_parallel.core.dtensor.factories import empty, full, ones, rand, randn, zeros
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh, get_current_mesh, init_device_mesh
    from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
    from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
    from hyper_parallel.core.dtensor.random import get_rng_state, manual_seed, set_rng_state, use_deterministic
    from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch

__all__ = [
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
]

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.dtensor.deferred_gradients": ("defer_grad_reduce",),
        "hyper_parallel.core.dtensor.dtensor": ("DTensor",),
        "hyper_parallel.core.dtensor.events": ("Event", "EventLog", "implicit_budget", "record_events", "strict"),
        "hyper_parallel.core.dtensor.factories": ("empty", "full", "ones", "rand", "randn", "zeros"),
        "hyper_parallel.core.dtensor.layout": ("Layout",),
        "hyper_parallel.core.dtensor.mesh": ("DeviceMesh", "get_current_mesh", "init_device_mesh"),
        "hyper_parallel.core.dtensor.module": ("distribute_module", "distribute_tensor"),
        "hyper_parallel.core.dtensor.placements": ("Partial", "Placement", "Replicate", "Shard", "StridedShard"),
        "hyper_parallel.core.dtensor.random": ("get_rng_state", "manual_seed", "set_rng_state", "use_deterministic"),
        "hyper_parallel.core.dtensor.skip_dispatch": ("SkipDTensorDispatch",),
    },
)

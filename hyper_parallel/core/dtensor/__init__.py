"""Room 2: what a distributed value is. Names are imported when first used; no framework comes with them."""

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

_HOMES = {
    "DTensor": "hyper_parallel.core.dtensor.dtensor",
    "DeviceMesh": "hyper_parallel.core.dtensor.mesh",
    "Event": "hyper_parallel.core.dtensor.events",
    "EventLog": "hyper_parallel.core.dtensor.events",
    "Layout": "hyper_parallel.core.dtensor.layout",
    "Partial": "hyper_parallel.core.dtensor.placements",
    "Placement": "hyper_parallel.core.dtensor.placements",
    "Replicate": "hyper_parallel.core.dtensor.placements",
    "Shard": "hyper_parallel.core.dtensor.placements",
    "StridedShard": "hyper_parallel.core.dtensor.placements",
    "distribute_module": "hyper_parallel.core.dtensor.module",
    "distribute_tensor": "hyper_parallel.core.dtensor.module",
    "empty": "hyper_parallel.core.dtensor.factories",
    "full": "hyper_parallel.core.dtensor.factories",
    "get_current_mesh": "hyper_parallel.core.dtensor.mesh",
    "implicit_budget": "hyper_parallel.core.dtensor.events",
    "init_device_mesh": "hyper_parallel.core.dtensor.mesh",
    "manual_seed": "hyper_parallel.core.dtensor.random",
    "ones": "hyper_parallel.core.dtensor.factories",
    "rand": "hyper_parallel.core.dtensor.factories",
    "randn": "hyper_parallel.core.dtensor.factories",
    "record_events": "hyper_parallel.core.dtensor.events",
    "strict": "hyper_parallel.core.dtensor.events",
    "zeros": "hyper_parallel.core.dtensor.factories",
}

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
    "StridedShard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "get_current_mesh",
    "implicit_budget",
    "init_device_mesh",
    "manual_seed",
    "ones",
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

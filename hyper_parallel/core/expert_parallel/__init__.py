"""Expert parallelism: experts are sharded over an axis, and tokens are sent to them. Names are imported lazily.

Importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.expert_parallel.losses import (
        load_balancing_loss as load_balancing_loss,
        router_z_loss as router_z_loss,
    )
    from hyper_parallel.core.expert_parallel.region import routed_experts as routed_experts

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.expert_parallel.losses": ("load_balancing_loss", "router_z_loss"),
        "hyper_parallel.core.expert_parallel.region": ("routed_experts",),
    },
)

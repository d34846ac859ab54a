"""Data parallelism: parameters, gradients and optimizer state sharded over a data axis. Names are imported lazily.

Importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.accumulation import (
        no_sync as no_sync,
        set_requires_gradient_sync as set_requires_gradient_sync,
    )
    from hyper_parallel.core.data_parallel.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hyper_parallel.core.data_parallel.replication import replicate as replicate
    from hyper_parallel.core.data_parallel.sharding import fully_shard as fully_shard
    from hyper_parallel.core.data_parallel.token_losses import global_mean as global_mean

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.data_parallel.accumulation": ("no_sync", "set_requires_gradient_sync"),
        "hyper_parallel.core.data_parallel.token_losses": ("global_mean",),
        "hyper_parallel.core.data_parallel.policy": ("MixedPrecisionPolicy",),
        "hyper_parallel.core.data_parallel.replication": ("replicate",),
        "hyper_parallel.core.data_parallel.sharding": ("fully_shard",),
    },
)

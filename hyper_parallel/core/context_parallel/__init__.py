"""Context parallelism: attention over sequences that are sharded over an axis. Names are imported lazily.

Importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.context_parallel.attention import context_parallel_attention as context_parallel_attention
    from hyper_parallel.core.context_parallel.plan import balanced_order as balanced_order

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.context_parallel.attention": ("context_parallel_attention",),
        "hyper_parallel.core.context_parallel.plan": ("balanced_order",),
    },
)

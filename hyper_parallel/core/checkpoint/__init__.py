"""Checkpoints that all ranks write at once, and that load on any other mesh. Names are imported lazily.

Importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.checkpoint.loading import load as load
    from hyper_parallel.core.checkpoint.names import Block as Block, Blocks as Blocks
    from hyper_parallel.core.checkpoint.saving import PendingSave as PendingSave, async_save as async_save, save as save

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.checkpoint.loading": ("load",),
        "hyper_parallel.core.checkpoint.names": ("Block", "Blocks"),
        "hyper_parallel.core.checkpoint.saving": ("PendingSave", "async_save", "save"),
    },
)

"""MindSpore's gap ledger."""

from __future__ import annotations

from hyper_parallel.platform.contract.ledger import Gap

__all__ = ["GAPS"]

GAPS = (
    Gap(
        "get_symmetric_memory_handler",
        "MindSpore has no symmetric memory",
        "use the collectives of the platform",
    ),
)

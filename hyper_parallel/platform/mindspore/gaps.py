"""MindSpore's gap ledger."""

from __future__ import annotations

from hyper_parallel.platform.contract.ledger import Gap

__all__ = ["GAPS"]

GAPS = (
    Gap(
        member="fully_sharded",
        reason="gradients are values of a function here, so nothing tells when a module's backward begins and ends",
        substitute="replicate parameters over the data axis, or train on PyTorch",
    ),
    Gap(
        "get_symmetric_memory_handler",
        "MindSpore has no symmetric memory",
        "use the collectives of the platform",
    ),
    Gap(
        member="replicated",
        reason="gradients are values of a function here, so nothing tells when a parameter's gradient is complete",
        substitute="average the gradients with all_reduce(gradient, op='avg') of the platform",
    ),
)

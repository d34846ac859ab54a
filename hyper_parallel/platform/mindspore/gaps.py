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
    Gap(
        "create_selective_checkpoint_contexts",
        "MindSpore records what an operator saves where it runs the operator, and cannot do one without the other, so "
        "a kept output cannot stand in for a recomputed one",
        "use ckpt_wrapper on the submodules that are cheap to recompute",
    ),
)

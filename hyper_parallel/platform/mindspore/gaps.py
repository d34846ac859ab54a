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
        "mindspore.recompute takes contexts and no policy of operators; its MsDispatchMode, which is experimental, can "
        "let a kept output stand in for a recomputed one, and is not used for that yet",
        "use ckpt_wrapper on the submodules that are cheap to recompute",
    ),
)

"""Room 4: what users touch. Names are imported when first used; no framework comes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.clip import clip_grad_norm_
    from hyper_parallel.core.tensor_parallel.loss import loss_parallel
    from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
    from hyper_parallel.core.tensor_parallel.styles import (
        ColwiseParallel,
        NoParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

__all__ = [
    "ColwiseParallel",
    "NoParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "clip_grad_norm_",
    "loss_parallel",
    "parallelize_module",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "hyper_parallel.core.tensor_parallel.clip": ("clip_grad_norm_",),
        "hyper_parallel.core.tensor_parallel.loss": ("loss_parallel",),
        "hyper_parallel.core.tensor_parallel.parallelize": ("parallelize_module",),
        "hyper_parallel.core.tensor_parallel.styles": (
            "ColwiseParallel",
            "NoParallel",
            "ParallelStyle",
            "PrepareModuleInput",
            "PrepareModuleInputOutput",
            "PrepareModuleOutput",
            "RowwiseParallel",
            "SequenceParallel",
        ),
    },
)

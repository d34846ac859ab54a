"""Tensor parallelism: styles, plans, sharded losses, gradient clipping. Names are imported lazily.

Importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from hyper_parallel.core.tensor_parallel.completion import complete_plan as complete_plan
    from hyper_parallel.core.tensor_parallel.loss import loss_parallel as loss_parallel
    from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module as parallelize_module
    from hyper_parallel.core.tensor_parallel.saved_inputs import input_reshard as input_reshard
    from hyper_parallel.core.tensor_parallel.styles import (
        ColwiseParallel as ColwiseParallel,
        ExpertParallel as ExpertParallel,
        HeadNorm as HeadNorm,
        LatentKV as LatentKV,
        NoParallel as NoParallel,
        ParallelStyle as ParallelStyle,
        PrepareModuleInput as PrepareModuleInput,
        PrepareModuleInputOutput as PrepareModuleInputOutput,
        PrepareModuleOutput as PrepareModuleOutput,
        ReplicateKV as ReplicateKV,
        RowwiseParallel as RowwiseParallel,
        SequenceParallel as SequenceParallel,
    )

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.tensor_parallel.clip": ("clip_grad_norm_",),
        "hyper_parallel.core.tensor_parallel.completion": ("complete_plan",),
        "hyper_parallel.core.tensor_parallel.loss": ("loss_parallel",),
        "hyper_parallel.core.tensor_parallel.parallelize": ("parallelize_module",),
        "hyper_parallel.core.tensor_parallel.saved_inputs": ("input_reshard",),
        "hyper_parallel.core.tensor_parallel.styles": None,
    },
)

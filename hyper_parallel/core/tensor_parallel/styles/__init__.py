"""Parallel styles. A new style has a file of its own and is listed here; the packages above re-export every style."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle as ParallelStyle
    from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel as ColwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel as ExpertParallel
    from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNorm as HeadNorm
    from hyper_parallel.core.tensor_parallel.styles.kv_heads import ReplicateKV as ReplicateKV
    from hyper_parallel.core.tensor_parallel.styles.latent_kv import LatentKV as LatentKV
    from hyper_parallel.core.tensor_parallel.styles.no_parallel import NoParallel as NoParallel
    from hyper_parallel.core.tensor_parallel.styles.prepare import (
        PrepareModuleInput as PrepareModuleInput,
        PrepareModuleInputOutput as PrepareModuleInputOutput,
        PrepareModuleOutput as PrepareModuleOutput,
    )
    from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel as RowwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel as SequenceParallel

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.tensor_parallel.styles.base": ("ParallelStyle",),
        "hyper_parallel.core.tensor_parallel.styles.colwise": ("ColwiseParallel",),
        "hyper_parallel.core.tensor_parallel.styles.experts": ("ExpertParallel",),
        "hyper_parallel.core.tensor_parallel.styles.head_norm": ("HeadNorm",),
        "hyper_parallel.core.tensor_parallel.styles.kv_heads": ("ReplicateKV",),
        "hyper_parallel.core.tensor_parallel.styles.latent_kv": ("LatentKV",),
        "hyper_parallel.core.tensor_parallel.styles.no_parallel": ("NoParallel",),
        "hyper_parallel.core.tensor_parallel.styles.prepare": (
            "PrepareModuleInput",
            "PrepareModuleInputOutput",
            "PrepareModuleOutput",
        ),
        "hyper_parallel.core.tensor_parallel.styles.rowwise": ("RowwiseParallel",),
        "hyper_parallel.core.tensor_parallel.styles.sequence": ("SequenceParallel",),
    },
)

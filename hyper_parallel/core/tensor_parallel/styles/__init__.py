"""Parallel styles, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
    from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.no_parallel import NoParallel
    from hyper_parallel.core.tensor_parallel.styles.prepare_input import PrepareModuleInput
    from hyper_parallel.core.tensor_parallel.styles.prepare_input_output import PrepareModuleInputOutput
    from hyper_parallel.core.tensor_parallel.styles.prepare_output import PrepareModuleOutput
    from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel

__all__ = [
    "ColwiseParallel",
    "NoParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "hyper_parallel.core.tensor_parallel.styles.base": ("ParallelStyle",),
        "hyper_parallel.core.tensor_parallel.styles.colwise": ("ColwiseParallel",),
        "hyper_parallel.core.tensor_parallel.styles.no_parallel": ("NoParallel",),
        "hyper_parallel.core.tensor_parallel.styles.prepare_input": ("PrepareModuleInput",),
        "hyper_parallel.core.tensor_parallel.styles.prepare_input_output": ("PrepareModuleInputOutput",),
        "hyper_parallel.core.tensor_parallel.styles.prepare_output": ("PrepareModuleOutput",),
        "hyper_parallel.core.tensor_parallel.styles.rowwise": ("RowwiseParallel",),
        "hyper_parallel.core.tensor_parallel.styles.sequence": ("SequenceParallel",),
    },
)

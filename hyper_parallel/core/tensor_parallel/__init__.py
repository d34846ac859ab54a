"""Room 4: what users touch. Names are imported when first used; no framework comes with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.clip import clip_grad_norm_
    from hyper_parallel.core.tensor_parallel.loss import loss_parallel
    from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
    from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
    from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.no_parallel import NoParallel
    from hyper_parallel.core.tensor_parallel.styles.prepare_input import PrepareModuleInput
    from hyper_parallel.core.tensor_parallel.styles.prepare_input_output import PrepareModuleInputOutput
    from hyper_parallel.core.tensor_parallel.styles.prepare_output import PrepareModuleOutput
    from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
    from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel

_HOMES = {
    "ColwiseParallel": "hyper_parallel.core.tensor_parallel.styles.colwise",
    "NoParallel": "hyper_parallel.core.tensor_parallel.styles.no_parallel",
    "ParallelStyle": "hyper_parallel.core.tensor_parallel.styles.base",
    "PrepareModuleInput": "hyper_parallel.core.tensor_parallel.styles.prepare_input",
    "PrepareModuleInputOutput": "hyper_parallel.core.tensor_parallel.styles.prepare_input_output",
    "PrepareModuleOutput": "hyper_parallel.core.tensor_parallel.styles.prepare_output",
    "RowwiseParallel": "hyper_parallel.core.tensor_parallel.styles.rowwise",
    "SequenceParallel": "hyper_parallel.core.tensor_parallel.styles.sequence",
    "clip_grad_norm_": "hyper_parallel.core.tensor_parallel.clip",
    "loss_parallel": "hyper_parallel.core.tensor_parallel.loss",
    "parallelize_module": "hyper_parallel.core.tensor_parallel.parallelize",
}

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


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})

"""What the engines of ``torch.distributed`` reduce themselves, and the options of those calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.transport.base import ORDERED_REDUCTIONS

__all__ = ["DTYPES", "OPS", "OPTIONS", "SCATTER_OPTIONS", "is_native"]

# Reductions and dtypes that accelerators' engines compute themselves; the rest is reduced in rank order.
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _options(kind: Any, op: Any) -> Any:
    options = kind()
    options.reduceOp = op
    return options


OPTIONS = {name: _options(dist.AllreduceOptions, op) for name, op in OPS.items()}
SCATTER_OPTIONS = {name: _options(dist.ReduceScatterOptions, op) for name, op in OPS.items()}
_COMMON_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64})
# "fake" is PyTorch's engine that moves nothing: host costs are measured on it, as an accelerator would have them.
DTYPES = {
    "nccl": _COMMON_DTYPES | {torch.float64, torch.uint8},
    "hccl": _COMMON_DTYPES,
    "fake": _COMMON_DTYPES,
}


def is_native(backend: str, dtype: torch.dtype, op: str) -> bool:
    """Whether ``backend`` reduces ``dtype`` with ``op`` itself; if not, the parts are reduced in rank order.

    They are, too, while PyTorch's deterministic algorithms are on, unless the order of a reduction does not matter.
    """
    native, ordered = _reduction(backend, dtype, op)
    return native and not (ordered and torch.are_deterministic_algorithms_enabled())


@cache
def _reduction(backend: str, dtype: torch.dtype, op: str) -> tuple[bool, bool]:
    """Whether ``backend`` reduces ``dtype`` with ``op`` itself, and whether the order of that matters."""
    whole = op == "avg" and not dtype.is_floating_point
    native = op in OPS and not whole and dtype in DTYPES.get(backend, ())
    return native, op in ORDERED_REDUCTIONS and dtype.is_floating_point

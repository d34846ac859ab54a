"""Which reductions an engine computes itself: an accelerator's own, on dtypes that it knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["DTYPES", "OPS", "OPTIONS", "is_native"]

# Reductions and dtypes that accelerators' engines compute themselves; the rest is folded in rank order.
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


OPTIONS = {name: _options(op) for name, op in OPS.items()}
_COMMON_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64})
# "fake" is PyTorch's engine that moves nothing: host costs are measured on it, as an accelerator would have them.
DTYPES = {
    "nccl": _COMMON_DTYPES | {torch.float64, torch.uint8},
    "hccl": _COMMON_DTYPES,
    "fake": _COMMON_DTYPES,
}


def is_native(backend: str, dtype: torch.dtype, op: str) -> bool:
    """Whether ``backend`` reduces ``dtype`` with ``op`` itself; what it does not is folded in rank order."""
    whole = op == "avg" and not dtype.is_floating_point
    return op in OPS and not whole and dtype in DTYPES.get(backend, ())

"""PyTorch's spellings of sorting, and of selections whose sizes depend on values."""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import aten, kernel, spelling

spelling("sort", "sort", signature="x, dim=-1, descending=False, *, stable=False")
spelling("sort", aten.sort.default, signature="x, dim=-1, descending=False")
spelling("sort", aten.sort.stable, signature="x, *, stable=False, dim=-1, descending=False")
spelling("argsort", "argsort", signature="x, dim=-1, descending=False, stable=False")
spelling("argsort", aten.argsort.default, signature="x, dim=-1, descending=False")
spelling("argsort", aten.argsort.stable, signature="x, *, stable=False, dim=-1, descending=False")
spelling("msort")
spelling("topk", "topk", aten.topk.default)
spelling("kthvalue", "kthvalue", aten.kthvalue.default)
spelling("quantile")
spelling("nanquantile")
spelling("unique")
spelling("unique_consecutive")
spelling("nonzero_static")


@kernel("sort")
def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> torch.return_types.sort:
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


@kernel("argsort")
def _argsort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    return torch.argsort(x, dim=dim, descending=descending, stable=stable)


@kernel("counts_to_index")
def _counts_to_index(repeats: Tensor, output_size: int | None = None) -> Tensor:
    return torch.repeat_interleave(repeats, output_size=output_size)

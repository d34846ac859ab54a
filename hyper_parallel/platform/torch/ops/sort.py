"""PyTorch's spellings of sorting and counting, and of selections whose sizes depend on values."""

from __future__ import annotations

from typing import Any

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


spelling("bucketize", torch.bucketize, aten.bucketize.Tensor, aten.bucketize.Scalar)
spelling("searchsorted", torch.searchsorted, aten.searchsorted.Tensor, aten.searchsorted.Scalar)
spelling("isin", torch.isin, aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
spelling("histc", "histc", aten.histc.default)
spelling("histogram", "histogram", aten.histogram.bin_ct)
spelling("histogram", aten.histogram.bins_tensor, signature="x, bins, *, weight=None, density=False")
spelling("histogramdd_edges", aten._histogramdd_bin_edges.default)
spelling("histogramdd_counts", aten._histogramdd_from_bin_cts.default)
spelling(
    "histogramdd_counts",
    aten._histogramdd_from_bin_tensors.default,
    signature="x, bins, *, weight=None, density=False",
)
spelling("bincount", "bincount", aten.bincount.default)


@kernel("bincount_to")
def _bincount_to(x: Tensor, weights: Tensor | None, count: int) -> Tensor:
    if (
        weights is not None and not x.numel()
    ):  # for an empty input PyTorch ignores the weights and returns integer counts
        nothing = torch.cat([weights, weights.new_zeros(1)])  # requires a gradient if the weights do
        return torch.bincount(x.new_zeros(1), nothing, count)[:count]
    return torch.bincount(x, weights, count)


@kernel("histogram")
def _histogram(x: Tensor, bins: Any, **options: Any) -> Any:
    if isinstance(bins, Tensor):
        options.pop("range", None)
    return torch.histogram(x, bins, **options)


@kernel("histogramdd_edges")
def _histogramdd_edges(x: Tensor, bins: Any, **options: Any) -> Any:
    return aten._histogramdd_bin_edges(x, bins, **options)


@kernel("histogramdd_counts")
def _histogramdd_counts(x: Tensor, bins: Any, **options: Any) -> Any:
    return aten._histogramdd_from_bin_cts(x, bins, **options)

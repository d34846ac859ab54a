"""PyTorch's names of bins, histograms and distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.core.shard.rules import histogram
from hyper_parallel.platform.torch.op_line import Line, both
from hyper_parallel.platform.torch.op_table_pointwise import keyword_call

__all__ = ["FUNCTIONS", "LOCAL", "OVERLOADS"]

assert histogram.__name__  # noqa: S101 - imported for the rules that it registers

aten = torch.ops.aten

FUNCTIONS = [
    Line("bucketize", (torch.bucketize,)),
    Line("searchsorted", (torch.searchsorted,)),
    Line("isin", (torch.isin,)),
    both("histc"),
    both("histogram"),
    both("bincount"),
    Line("cdist", (torch.cdist,), "x, y, p=2.0, compute_mode='use_mm_for_euclid_dist_if_necessary'"),
]

OVERLOADS = [
    Line("bucketize", (aten.bucketize.Tensor, aten.bucketize.Scalar)),
    Line("searchsorted", (aten.searchsorted.Tensor, aten.searchsorted.Scalar)),
    Line("isin", (aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)),
    Line("histc", (aten.histc.default,)),
    Line("histogram", (aten.histogram.bins_tensor,), "x, bins, *, weight=None, density=False"),
    Line("histogram", (aten.histogram.bin_ct,)),
    Line("histogramdd_edges", (aten._histogramdd_bin_edges.default,)),  # noqa: SLF001 - an operator's name
    Line("histogramdd_counts", (aten._histogramdd_from_bin_cts.default,)),  # noqa: SLF001 - the same
    Line(
        "histogramdd_counts",
        (aten._histogramdd_from_bin_tensors.default,),  # noqa: SLF001 - the same
        "x, bins, *, weight=None, density=False",
    ),
    Line("bincount", (aten.bincount.default,)),
]


def _bincount_to(x: Tensor, weights: Tensor | None, count: int) -> Tensor:
    if weights is not None and not x.numel():  # of an empty piece PyTorch counts, in integers
        return torch.bincount(x.new_zeros(1), weights.new_zeros(1), count)[:count]
    return torch.bincount(x, weights, count)


def _histogram(x: Tensor, bins: Any, **options: Any) -> Any:
    if isinstance(bins, Tensor):
        options.pop("range", None)
    return torch.histogram(x, bins, **options)


def _by_name(name: str) -> Callable[..., Any]:
    return keyword_call(getattr(torch, name), find_rule(name).signature)  # type: ignore[union-attr] # the family is loaded


LOCAL: dict[str, Callable[..., Any]] = {
    **{name: _by_name(name) for name in ("bucketize", "searchsorted", "isin", "histc")},
    "histogram": _histogram,
    "histogramdd_edges": lambda x, bins, **options: aten._histogramdd_bin_edges(x, bins, **options),  # noqa: SLF001 - its name
    "histogramdd_counts": lambda x, bins, **options: aten._histogramdd_from_bin_cts(x, bins, **options),  # noqa: SLF001 - its name
    "bincount_to": _bincount_to,
    "cdist": lambda x, y, p, compute_mode: torch.cdist(x, y, p, compute_mode or "use_mm_for_euclid_dist_if_necessary"),
}

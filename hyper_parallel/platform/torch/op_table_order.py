"""PyTorch's names of sorting, sizes that depend on values, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fft

from hyper_parallel.core.shard.rules.fft import KINDS
from hyper_parallel.platform.torch.op_line import Line, both
from hyper_parallel.platform.torch.op_table_pointwise import by_name

__all__ = ["FUNCTIONS", "LOCAL", "OVERLOADS"]

aten = torch.ops.aten

STABLE = "x, *, stable=False, dim=-1, descending=False"

ORDER = [
    both("sort", signature="x, dim=-1, descending=False, *, stable=False"),
    both("argsort", signature="x, dim=-1, descending=False, stable=False"),
    both("msort"),
    both("topk"),
    both("kthvalue"),
    both("quantile"),
    both("nanquantile"),
]

COUNTS = [
    Line("unique", (torch.unique, Tensor.unique)),
    Line("unique_consecutive", (torch.unique_consecutive, Tensor.unique_consecutive)),
    Line("nonzero_static", (torch.nonzero_static, Tensor.nonzero_static)),
]

TRANSFORMS = [
    *(Line(name, (getattr(fft, name),)) for kind in KINDS for name in (kind, f"{kind}2", f"{kind}n")),
    Line("stft", (torch.stft, Tensor.stft)),
    Line("istft", (torch.istft, Tensor.istft)),
]

FUNCTIONS = [*ORDER, *COUNTS, *TRANSFORMS]

OVERLOADS = [
    Line("sort", (aten.sort.default,), "x, dim=-1, descending=False"),
    Line("sort", (aten.sort.stable,), STABLE),
    Line("argsort", (aten.argsort.default,), "x, dim=-1, descending=False"),
    Line("argsort", (aten.argsort.stable,), STABLE),
    Line("topk", (aten.topk.default,)),
    Line("kthvalue", (aten.kthvalue.default,)),
]


LOCAL: dict[str, Callable[..., Any]] = {
    **by_name([*FUNCTIONS, *OVERLOADS]),
    "sort": lambda x, dim=-1, descending=False, stable=False: torch.sort(
        x, dim=dim, descending=descending, stable=stable
    ),
    "argsort": lambda x, dim=-1, descending=False, stable=False: torch.argsort(
        x, dim=dim, descending=descending, stable=stable
    ),
    "counts_to_index": lambda repeats, output_size=None: torch.repeat_interleave(repeats, output_size=output_size),
}

"""PyTorch's embeddings; with the table's rows over ranks, each looks up what it has."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.ops.index import Window, within
from hyper_parallel.platform.torch.ops.registry import aten, kernel, spelling

spelling("embedding", F.embedding, canonical=True)
spelling("embedding_bag", F.embedding_bag)
spelling("lookup", aten.embedding.default, canonical=True)


@kernel("embedding")
def _embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    window: Window | None = None,
) -> Tensor:
    """``F.embedding``, or what the rows ``window`` of a larger table contribute to it."""
    if not x.numel():
        return _without_ids(x, weight)
    if window is None:
        return F.embedding(x, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    table, local, inside = within(weight, 0, x, window)
    return F.embedding(local, table, _local_padding(padding_idx, window)).masked_fill(~inside[..., None], 0)


def _without_ids(x: Tensor, weight: Tensor) -> Tensor:
    """Nothing, on the graph of ``weight``; PyTorch cannot differentiate a look-up of no ids twice."""
    return weight[:0].reshape(*x.shape, weight.shape[1]).clone()  # no view: it may be written


def _local_padding(padding_idx: int | None, window: Window) -> int | None:
    start, stop, _ = window
    return padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None


@kernel("lookup")
def _lookup(weight: Tensor, x: Tensor, padding_idx: int | None = -1, **rest: Any) -> Tensor:
    return _embedding(x, weight, None if padding_idx is None or padding_idx < 0 else padding_idx, **rest)


@kernel("embedding_bag")
def _embedding_bag(x: Tensor, **rest: Any) -> Any:
    return F.embedding_bag(x, **rest)

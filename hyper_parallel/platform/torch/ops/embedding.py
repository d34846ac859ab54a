"""PyTorch's embeddings; if the table is sharded by rows, each rank looks up its own rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.ops.index import Window, within
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

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
    """``F.embedding``; with ``window``, ``weight`` has only these rows of the table, and other rows give zeros."""
    if not x.numel() and not sparse:
        return _without_ids(x, weight)
    if window is None:
        return F.embedding(x, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if sparse:
        return _sparse_embedding(x, weight, padding_idx, window)
    table, local, inside = within(weight, 0, x, window)
    return F.embedding(local, table, _local_padding(padding_idx, window)).masked_fill(~inside[..., None], 0)


def _sparse_embedding(x: Tensor, weight: Tensor, padding_idx: int | None, window: Window) -> Tensor:
    """A look-up whose gradient has only the rows of this rank's ids, so that optimizers do not change other rows."""
    _, local, inside = within(weight, 0, x, window)
    rows = F.embedding(local[inside], weight, _local_padding(padding_idx, window), sparse=True)
    return rows.new_zeros(*x.shape, weight.shape[1]).index_put((inside,), rows)


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (scale,) = ctx.saved_tensors
        return grad * scale, None


@decomposition(
    F.embedding,
    signature="x, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
    op="embedding",
)
def _embedding_with_options(
    ops: Any,
    x: Any,
    weight: Any,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Any:
    """Look rows up, after scaling them to ``max_norm``; gradients of frequent ids may be scaled down."""
    if max_norm is None and not scale_grad_by_freq:
        return ops.embedding(x, weight, padding_idx, sparse=sparse)
    with torch.no_grad():
        counts = _counts(x, weight)
        if max_norm is not None:
            norms = torch.linalg.vector_norm(weight, norm_type, 1)
            longer = (counts > 0) & (norms > max_norm)
            weight.mul_(torch.where(longer, max_norm / (norms + 1e-7), torch.ones_like(norms)).unsqueeze(1))
    rows = ops.embedding(x, weight, padding_idx, sparse=sparse)
    if not scale_grad_by_freq:
        return rows
    share = ops.embedding(x, (1.0 / counts.clamp(min=1)).unsqueeze(1))
    return _ScaledGradient.apply(rows, share.to(weight.dtype))


def _counts(x: Any, weight: Any) -> Any:
    """How often each row of ``weight`` is looked up."""
    ids = x.reshape(-1)
    counts = weight.new_zeros((weight.shape[0],), dtype=torch.float64)
    return counts.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.float64))


def _without_ids(x: Tensor, weight: Tensor) -> Tensor:
    """An empty result on the graph of ``weight``, since PyTorch cannot differentiate a look-up of no ids twice."""
    return weight[:0].reshape(*x.shape, weight.shape[1]).clone()  # a copy, because the caller may write to it


def _local_padding(padding_idx: int | None, window: Window) -> int | None:
    start, stop, _ = window
    return padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None


@kernel("lookup")
def _lookup(weight: Tensor, x: Tensor, padding_idx: int | None = -1, **rest: Any) -> Tensor:
    return _embedding(x, weight, None if padding_idx is None or padding_idx < 0 else padding_idx, **rest)


@kernel("embedding_bag")
def _embedding_bag(x: Tensor, **rest: Any) -> Any:
    return F.embedding_bag(x, **rest)

"""CPU implementations of MindSpore kernels that exist only on Ascend devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.mindspore.versions import op_enum

__all__ = ["attention", "grouped_matmul", "moe_token_permute", "moe_token_unpermute", "rms_norm", "swiglu"]

_HIDDEN = -1e30
_LEFT_UP, _RIGHT_DOWN = 2, 3  # sparse modes: causal mask aligned to the first, or to the last, query and key


def swiglu(x: Any, dim: int = -1) -> Any:
    """Split ``x`` along ``dim`` into halves ``gate`` and ``linear``; return ``silu(gate) * linear``."""
    gate, linear = mint.chunk(x, 2, dim)
    return gate * mint.sigmoid(gate) * linear


def rms_norm(x: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[Any, Any]:
    """Return ``x / rms * gamma`` and ``1 / rms``; ``rms`` is the root mean square over the dims of ``gamma``."""
    dims = tuple(range(x.ndim - gamma.ndim, x.ndim))
    reciprocal = mint.rsqrt(mint.mean(x * x, dims, keepdim=True) + epsilon)
    return x * reciprocal * gamma, reciprocal


def grouped_matmul(
    self: Any, x: Sequence[Any], weight: Sequence[Any], bias: Any = None, *others: Any, group_list: Any = None
) -> tuple[Any]:
    """Multiply each group of rows of a matrix by the group's weight matrix; ``group_list`` has the ends of the groups.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) other forms of the operator.
    """
    quantization, ends = others[:4], others[4] if len(others) == 5 else group_list
    plain = bias is None and all(each is None for each in quantization) and len(x) == len(weight) == 1
    if not plain or ends is None or (self.split_item, self.group_type) != (3, 0):
        _refuse("GroupedMatmul", "split_item other than 3, group_type other than 0, biases and quantization")
    (rows,), (matrices,), start, products = x, weight, 0, []
    for number, end in enumerate(int(each) for each in ends.asnumpy()):
        products.append(
            mint.matmul(
                mint.narrow(rows, 0, start, end - start),
                mint.narrow(matrices, 0, number, 1).reshape(*matrices.shape[1:]),
            )
        )
        start = end
    return (mint.cat(products, 0),)


def moe_token_permute(tokens: Any, indices: Any, num_out_tokens: int | None = None, padded_mode: bool = False) -> Any:
    """Return the rows of ``tokens`` sorted by expert, and the index that each pair (token, choice) has there.

    Args:
        tokens: matrix of tokens.
        indices: expert of each token and choice; a token may choose several experts.
        num_out_tokens: number of rows to return; by default, all rows.
        padded_mode: not supported.
    """
    count = int(np.prod(indices.shape))
    if padded_mode or num_out_tokens not in (None, 0, count):
        _refuse("moe_token_permute", "padding and dropped tokens")
    order = np.argsort(indices.asnumpy().reshape(-1), kind="stable")
    went = np.empty(count, np.int32)
    went[order] = np.arange(count)
    return ops.gather(tokens, Tensor(order // (count // tokens.shape[0])), 0), Tensor(went)


def moe_token_unpermute(permuted: Any, went: Any, probs: Any = None, *others: Any) -> Any:
    """Return for each token the sum of the rows of its choices, weighted by the choices' probabilities.

    Args:
        permuted: rows sorted by expert.
        went: the second result of :func:`moe_token_permute`.
        probs: probability of each token and choice; None if each token has one choice, of weight 1.
        others: not supported.
    """
    if any(others):
        _refuse("moe_token_unpermute", "padding")
    choices = 1 if probs is None else probs.shape[1]
    rows = ops.gather(permuted, went.reshape(-1), 0).reshape(-1, choices, permuted.shape[-1])
    return (rows if probs is None else rows * mint.unsqueeze(probs, -1)).sum(1)


def attention(
    self: Any, query: Any, key: Any, value: Any, real_shift: Any = None, drop_mask: Any = None,
    padding_mask: Any = None, attn_mask: Any = None, prefix: Any = None, *lengths: Any, **other_lengths: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Compute ``FlashAttentionScore``: return maxima and sums of the softmax, an empty tensor, and the attention.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) packed sequences, dropout, prefixes, other sparse modes.
    """
    unused = (drop_mask, padding_mask, prefix, *lengths, *other_lengths.values())
    if any(each is not None for each in unused) or self.input_layout not in _LAYOUTS:
        _refuse("FlashAttentionScore", "packed sequences (layout TND), dropout, padding masks and prefixes")
    split, merge = _LAYOUTS[self.input_layout]
    heads, query_rows = self.head_num, split(query, self.head_num)
    split_heads = key.ndim == query_rows.ndim
    key_heads = split(key, 0).shape[1] if split_heads else key.shape[-1] * heads // query.shape[-1]
    key_rows, value_rows = (_repeated(split(each, key_heads), heads // key_heads) for each in (key, value))
    scores = mint.matmul(query_rows, mint.transpose(key_rows, -1, -2))
    scores = (scores if real_shift is None else scores + real_shift).astype(mindspore.float32) * self.scale_value
    hidden = _hidden(self, attn_mask, scores.shape[-2], scores.shape[-1])
    if hidden is not None:
        scores = mint.where(hidden, Tensor(_HIDDEN, mindspore.float32), scores)
    largest = ops.stop_gradient(mint.amax(scores, -1, keepdim=True))
    shares = mint.exp(scores - largest)
    total = shares.sum(-1, keepdims=True)
    output = mint.matmul((shares / total).astype(value.dtype), value_rows)
    statistics = (mint.tile(each, (1, 1, 1, 8)) for each in (largest, ops.stop_gradient(total)))
    return (*statistics, mint.zeros((0,), dtype=query.dtype), merge(output))


def _hidden(self: Any, mask: Any, rows: int, columns: int) -> Any:
    """Return a boolean mask that broadcasts to the scores, True for scores to ignore; None if none are ignored."""
    if self.sparse_mode in (_LEFT_UP, _RIGHT_DOWN):
        offset = columns - rows if self.sparse_mode == _RIGHT_DOWN else 0
        return Tensor(np.triu(np.ones((rows, columns), bool), 1 + offset))
    if self.sparse_mode not in (0, 1):
        _refuse("FlashAttentionScore", f"sparse_mode {self.sparse_mode}")
    if mask is not None:
        return mask.astype(mindspore.bool_)
    if self.sparse_mode == 0 and min(self.next_tokens, self.pre_tokens) < max(rows, columns):
        places = np.arange(columns)[None, :] - np.arange(rows)[:, None]
        return Tensor((places > self.next_tokens) | (-places > self.pre_tokens))
    return None


def _repeated(x: Any, times: int) -> Any:
    """Return ``x`` (batch, heads, length, width) with each head repeated ``times`` times."""
    if times == 1:
        return x
    batch, heads, length, width = x.shape
    return mint.tile(mint.unsqueeze(x, 2), (1, 1, times, 1, 1)).reshape(batch, heads * times, length, width)


def _transposed(x: Any, _: int = 0) -> Any:
    return mint.transpose(x, 1, 2)


_BY_NAME: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "BNSD": (lambda x, _: x, lambda x: x),
    "BSND": (_transposed, _transposed),
    "BSH": (
        lambda x, n: mint.transpose(x.reshape(*x.shape[:2], n, -1), 1, 2),
        lambda x: mint.transpose(x, 1, 2).reshape(x.shape[0], x.shape[2], -1),
    ),
    "SBH": (
        lambda x, n: mint.permute(x.reshape(*x.shape[:2], n, -1), (1, 2, 0, 3)),
        lambda x: mint.permute(x, (2, 0, 1, 3)).reshape(x.shape[2], x.shape[0], -1),
    ),
}
_LAYOUTS = {op_enum.str_to_enum("FlashAttentionScore", "input_layout", name): forms for name, forms in _BY_NAME.items()}


def _refuse(kernel: str, what: str) -> None:
    msg = f"{kernel}: the CPU has no stand-in for {what}"
    raise UnsupportedOnBackend(msg)

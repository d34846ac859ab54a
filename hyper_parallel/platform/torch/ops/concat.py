"""PyTorch's spellings of joins and their inverses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

spelling("cat", torch.cat, torch.concat, torch.concatenate, signature="tensors, dim=0")
spelling("cat", aten.cat.default)
spelling("stack", torch.stack, aten.stack.default)
spelling("hstack", torch.hstack)
spelling("vstack", torch.vstack)
spelling("unbind", "unbind", aten.unbind.int)
spelling("split", "split")
spelling("split", "split_with_sizes", signature="x, split_size_or_sections, dim=0")
spelling("split", aten.split.Tensor, aten.split_with_sizes.default, canonical=True)
spelling("chunk", "chunk")
spelling("tensor_split")


@kernel("split")
def _split(x: Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    return x.split(split_size_or_sections, dim)


# -- parts of which autograd does not know that they share memory ------------------------------------------------------


@decomposition(
    "unsafe_split",
    "unsafe_split_with_sizes",
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    signature="x, split_size_or_sections, dim=0",
    op="unsafe_split",
)
def _unsafe_split(ops: Any, x: Any, split_size_or_sections: Any, dim: int) -> Any:
    return _read_only(ops.split(x, split_size_or_sections, dim), "split")


@decomposition("unsafe_chunk", signature="x, chunks, dim=0")
def _unsafe_chunk(ops: Any, x: Any, chunks: int, dim: int) -> Any:
    return _read_only(ops.chunk(x, chunks, dim), "chunk")


def _read_only(parts: Any, safe: str) -> Any:
    """Refuse writes to ``parts``: neither gradients nor what was redistributed before would follow them."""
    for part in parts:
        part._readonly = part._readonly or (
            f"it is a part by unsafe_{safe}, whose writes autograd does not see; use {safe}, or write to a clone()"
        )
    return parts

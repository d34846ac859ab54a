"""PyTorch's spellings of joins and their inverses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import aten, kernel, spelling

spelling("cat", torch.cat, torch.concat, torch.concatenate, signature="tensors, dim=0")
spelling("cat", aten.cat.default)
spelling("stack", torch.stack, aten.stack.default)
spelling("hstack", torch.hstack)
spelling("vstack", torch.vstack)
spelling("unbind", "unbind", aten.unbind.int)
spelling("split", "split", "unsafe_split")
spelling("split", "split_with_sizes", "unsafe_split_with_sizes", signature="x, split_size_or_sections, dim=0")
spelling(
    "split", aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default, canonical=True,
)  # fmt: skip
spelling("chunk", "chunk", "unsafe_chunk")
spelling("tensor_split")


@kernel("split")
def _split(x: Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    return x.split(split_size_or_sections, dim)

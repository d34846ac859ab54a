"""PyTorch's spellings of products of matrices and vectors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import aten, kernel, spelling

spelling("linear", F.linear)
spelling("matmul", torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul)
spelling("matmul", Tensor.__rmatmul__, signature="y, x")
spelling("mm", "mm", aten.mm.default)
spelling("bmm", "bmm", aten.bmm.default)
spelling("mv", "mv", aten.mv.default)
spelling("dot", "dot", "vdot", aten.dot.default, aten.vdot.default)
spelling("outer", "outer", "ger")
spelling("addmm", "addmm", aten.addmm.default, copies_back=True)
spelling("baddbmm", "baddbmm", aten.baddbmm.default, copies_back=True)
spelling("addmv", "addmv", aten.addmv.default, canonical=True, copies_back=True)
spelling("addbmm", "addbmm", aten.addbmm.default, copies_back=True)
spelling("addr", "addr", aten.addr.default, copies_back=True)
spelling("bilinear", F.bilinear, torch.bilinear)
spelling("block_diag", torch.block_diag, aten.block_diag.default, canonical=True)
spelling("einsum", torch.einsum, canonical=True)


@kernel("addmm")
def _addmm(bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.addmm(bias, x, y, beta=beta, alpha=alpha)


@kernel("baddbmm")
def _baddbmm(bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.baddbmm(bias, x, y, beta=beta, alpha=alpha)


@kernel("addmv")
def _addmv(bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    # A bias of one element with an empty contraction is not broadcast by PyTorch.
    return torch.addmv(bias.expand(x.shape[0]), x, y, beta=beta, alpha=alpha)


@kernel("addbmm")
def _addbmm(bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.addbmm(bias, x, y, beta=beta, alpha=alpha)


@kernel("addr")
def _addr(bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.addr(bias, x, y, beta=beta, alpha=alpha)


@kernel("block_diag")
def _block_diag(tensors: Any) -> Tensor:
    return torch.block_diag(*tensors)


@kernel("einsum")
def _einsum(equation: str, operands: Any) -> Tensor:
    return torch.einsum(equation, *operands)

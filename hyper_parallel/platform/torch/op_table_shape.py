"""PyTorch's names of the matmul family, views, joins and whatever moves elements along dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.op_line import Line, both, method

__all__ = ["FUNCTIONS", "LOCAL"]

MATMUL = [
    Line("linear", (F.linear,)),
    Line("matmul", (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul)),
    Line("matmul", (Tensor.__rmatmul__,), "y, x"),
    both("mm"),
    both("bmm"),
    both("mv"),
    both("dot", "dot", "vdot"),
    both("outer", "outer", "ger"),
    both("addmm"),
    both("baddbmm"),
    both("addmv", canonical=True),
    both("addbmm"),
    both("addr"),
    Line("bilinear", (F.bilinear, torch.bilinear)),
    Line("block_diag", (torch.block_diag,), canonical=True),
    Line("einsum", (torch.einsum,), canonical=True),
]

VIEWS = [
    both("view", "view", "reshape", signature="x, *shape", canonical=True),
    both("flatten"),
    both("unflatten"),
    method("view_as", "view_as", "reshape_as"),
    both("transpose", "transpose", "swapaxes", "swapdims"),
    both("permute"),
    both("movedim", "movedim", "moveaxis"),
    both("t"),
    Line("reversed_dims", (Tensor.T.__get__,)),  # type: ignore[attr-defined]
    Line("matrix_transpose", (Tensor.mT.__get__, Tensor.adjoint, torch.adjoint)),  # type: ignore[attr-defined]
    both("squeeze", canonical=True),
    both("unsqueeze"),
    both("expand", "expand", "broadcast_to", canonical=True),
    method("expand_as", "expand_as"),
    both("narrow"),
    both("select"),
    both("diagonal"),
    method("unfold", "unfold"),
    both("unbind"),
    both("split"),
    both("split", "split_with_sizes", signature="x, split_size_or_sections, dim=0"),
    both("split", "unsafe_split"),
    both("split", "unsafe_split_with_sizes", signature="x, split_size_or_sections, dim=0"),
    both("chunk", "chunk", "unsafe_chunk"),
    both("tensor_split"),
    both("repeat"),
    both("tile"),
    both("repeat_each", "repeat_interleave"),
]

COMPLEX = [
    both("conj"),
    both("conj_physical"),
    both("resolve_conj"),
    both("resolve_neg"),
    Line("view_as_real", (torch.view_as_real,)),
    Line("view_as_complex", (torch.view_as_complex,)),
    Line("real", (torch.real, Tensor.real.__get__)),  # type: ignore[attr-defined]
    Line("imag", (torch.imag, Tensor.imag.__get__)),  # type: ignore[attr-defined]
]

JOINS = [
    Line("cat", (torch.cat, torch.concat, torch.concatenate), "tensors, dim=0"),
    Line("stack", (torch.stack,)),
    Line("hstack", (torch.hstack,)),
    Line("vstack", (torch.vstack,)),
    Line("glu", (F.glu,)),
    both("roll"),
    both("flip"),
    both("tril"),
    both("triu"),
]

FUNCTIONS = [*MATMUL, *VIEWS, *COMPLEX, *JOINS]


def _squeeze(x: Tensor, dim: Any = None) -> Tensor:
    return x.squeeze() if dim is None else x.squeeze(dim)


def _repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, output_size: int | None = None) -> Tensor:
    return x.repeat_interleave(repeats, dim, output_size=output_size)


LOCAL: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "mv": torch.mv,
    "dot": torch.dot,
    "outer": torch.outer,
    "addmm": lambda bias, x, y, beta=1, alpha=1: torch.addmm(bias, x, y, beta=beta, alpha=alpha),
    "baddbmm": lambda bias, x, y, beta=1, alpha=1: torch.baddbmm(bias, x, y, beta=beta, alpha=alpha),
    # A bias of one element beside an empty contraction is not broadcast by PyTorch.
    "addmv": lambda bias, x, y, beta=1, alpha=1: torch.addmv(bias.expand(x.shape[0]), x, y, beta=beta, alpha=alpha),
    "addbmm": lambda bias, x, y, beta=1, alpha=1: torch.addbmm(bias, x, y, beta=beta, alpha=alpha),
    "addr": lambda bias, x, y, beta=1, alpha=1: torch.addr(bias, x, y, beta=beta, alpha=alpha),
    "bilinear": F.bilinear,
    "block_diag": lambda tensors: torch.block_diag(*tensors),
    "einsum": lambda equation, operands: torch.einsum(equation, *operands),
    "view": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, dim0, dim1: x.transpose(dim0, dim1),
    "permute": lambda x, dims: x.permute(dims),
    "movedim": lambda x, source, destination: x.movedim(source, destination),
    "t": lambda x: x.t(),
    "reversed_dims": lambda x: x.permute(tuple(range(x.ndim))[::-1]),
    "matrix_transpose": lambda x: x.mT,
    "squeeze": _squeeze,
    "conj": lambda x: x.conj(),
    "conj_physical": lambda x: x.conj_physical(),
    "resolve_conj": lambda x: x.resolve_conj(),
    "resolve_neg": lambda x: x.resolve_neg(),
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "view_as_real": lambda x: torch.view_as_real(x),
    "view_as_complex": lambda x: torch.view_as_complex(x),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "expand": lambda x, shape, **_: x.expand(shape),
    "narrow": lambda x, dim, start, length: x.narrow(dim, start, length),
    "slice": lambda x, dim, start, end, step: torch.ops.aten.slice.Tensor(x, dim, start, end, step),
    "select": lambda x, dim, index: x.select(dim, index),
    "diagonal": lambda x, offset=0, dim1=0, dim2=1: x.diagonal(offset, dim1, dim2),
    "unfold": lambda x, dimension, size, step: x.unfold(dimension, size, step),
    "unbind": lambda x, dim=0: x.unbind(dim),
    "split": lambda x, split_size_or_sections, dim=0: x.split(split_size_or_sections, dim),
    "repeat": lambda x, repeats: x.repeat(repeats),
    "repeat_interleave": _repeat_interleave,
    "cat": lambda tensors, dim=0: torch.cat(tensors, dim),
    "stack": lambda tensors, dim=0: torch.stack(tensors, dim),
    "roll": lambda x, shifts, dims=None: x.roll(shifts) if dims is None else x.roll(shifts, dims),
    "flip": lambda x, dims: x.flip(dims),
    "tril": lambda x, diagonal=0: x.tril(diagonal),
    "triu": lambda x, diagonal=0: x.triu(diagonal),
}

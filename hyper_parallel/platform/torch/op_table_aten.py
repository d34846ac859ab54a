"""PyTorch's operator overloads: what functions without a rule of their own are made of."""

from __future__ import annotations

import torch

from hyper_parallel.platform.torch.op_line import Line

__all__ = ["OVERLOADS"]

aten = torch.ops.aten

SHAPE = [
    Line("mm", (aten.mm.default,)),
    Line("bmm", (aten.bmm.default,)),
    Line("mv", (aten.mv.default,)),
    Line("dot", (aten.dot.default,)),
    Line("addmm", (aten.addmm.default,)),
    Line("baddbmm", (aten.baddbmm.default,)),
    Line("addmv", (aten.addmv.default,), canonical=True),
    Line("addbmm", (aten.addbmm.default,)),
    Line("view", (aten.view.default, aten._unsafe_view.default, aten.reshape.default), canonical=True),  # noqa: SLF001
    Line("t", (aten.t.default,)),
    Line("transpose", (aten.transpose.int,)),
    Line("permute", (aten.permute.default,)),
    Line("expand", (aten.expand.default,), "x, shape, *, implicit=False", canonical=True),
    Line("unsqueeze", (aten.unsqueeze.default,)),
    Line("squeeze", (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), canonical=True),
    Line("slice", (aten.slice.Tensor,)),
    Line("select", (aten.select.int,)),
    Line("unbind", (aten.unbind.int,)),
    Line("cat", (aten.cat.default,)),
    Line("stack", (aten.stack.default,)),
    Line("split", (aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default), canonical=True),
    Line("split", (aten.split.Tensor, aten.split_with_sizes.default), canonical=True),
    Line("repeat", (aten.repeat.default,)),
    Line("roll", (aten.roll.default,)),
    Line("flip", (aten.flip.default,)),
    Line("tril", (aten.tril.default,)),
    Line("triu", (aten.triu.default,)),
]

INDEXED = [
    Line("gather", (aten.gather.default,)),
    Line("index_select", (aten.index_select.default,)),
    Line("scatter", (aten.scatter.src,)),
    Line("scatter", (aten.scatter.value,)),
    Line("scatter_add", (aten.scatter_add.default,)),
    Line("index_add", (aten.index_add.default,)),
    Line("lookup", (aten.embedding.default,), canonical=True),
    Line("native_layer_norm", (aten.native_layer_norm.default,)),
]

# Spellings that only composite functions use.
INNER = [
    Line("clamp", (aten.clamp_min.default, aten.clamp_min.Tensor), "x, min"),
    Line("clamp", (aten.clamp_max.default, aten.clamp_max.Tensor), "x, max"),
    Line("clamp", (aten.clamp_min_.default, aten.clamp_min_.Tensor), "x, min", in_place=True),
    Line("clamp", (aten.clamp_max_.default, aten.clamp_max_.Tensor), "x, max", in_place=True),
    Line("dot", (aten.vdot.default,)),
    Line("diagonal", (aten.diagonal.default,)),
    Line("unfold", (aten.unfold.default,)),
    Line("addr", (aten.addr.default,)),
    Line("conj", (aten._conj.default,)),  # noqa: SLF001 - an operator's name
    Line("conj_physical", (aten._conj_physical.default, aten.conj_physical.default)),  # noqa: SLF001 - the same
    Line("view_as_real", (aten.view_as_real.default,)),
    Line("view_as_complex", (aten.view_as_complex.default,)),
    Line("block_diag", (aten.block_diag.default,), canonical=True),
    Line("softmax_backward", (aten._softmax_backward_data.default,)),  # noqa: SLF001 - the same
    Line("log_softmax_backward", (aten._log_softmax_backward_data.default,)),  # noqa: SLF001 - the same
    Line("prelu", (aten._prelu_kernel.default,)),  # noqa: SLF001 - an operator's name
]

OVERLOADS = [*SHAPE, *INDEXED, *INNER]

"""PyTorch's operator overloads: what functions without a rule of their own are made of."""

from __future__ import annotations

import torch

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.platform.torch.op_line import Line

__all__ = ["OVERLOADS"]

aten = torch.ops.aten
rules.load()

SHAPE = [
    Line("mm", (aten.mm.default,)),
    Line("bmm", (aten.bmm.default,)),
    Line("mv", (aten.mv.default,)),
    Line("dot", (aten.dot.default,)),
    Line("addmm", (aten.addmm.default,)),
    Line("baddbmm", (aten.baddbmm.default,)),
    Line("addmv", (aten.addmv.default,)),
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


def _unary(*ops: str) -> list[Line]:
    return [Line(op, (getattr(aten, op).default,)) for op in ops]


def _binary(*ops: str) -> list[Line]:
    return [Line(op, (getattr(aten, op).Tensor,)) for op in ops]


POINTWISE = [
    *_unary("abs", "neg", "exp", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "relu", "silu", "gelu", "erf", "log"),
    *_unary("reciprocal", "sign", "floor", "ceil", "round", "clone", "detach", "alias", "logical_not", "isnan"),
    *_unary("leaky_relu", "elu", "softplus", "hardtanh", "log1p", "expm1", "log2", "contiguous"),
    *_binary("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge"),
    *(Line(op, (getattr(aten, op).Scalar,)) for op in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")),
    Line("div", (aten.div.Tensor, aten.div.Tensor_mode)),
    Line("add", (aten.add_.Tensor,), in_place=True),
    Line("sub", (aten.sub_.Tensor,), in_place=True),
    Line("mul", (aten.mul_.Tensor,), in_place=True),
    Line("div", (aten.div_.Tensor,), in_place=True),
    Line("pow", (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)),
    Line("maximum", (aten.maximum.default,)),
    Line("minimum", (aten.minimum.default,)),
    Line("where", (aten.where.self,)),
    Line("masked_fill", (aten.masked_fill.Scalar, aten.masked_fill.Tensor)),
    Line("clamp", (aten.clamp.default,)),
]

REDUCTIONS = [
    Line("sum", (aten.sum.dim_IntList, aten.sum.default)),
    Line("mean", (aten.mean.dim, aten.mean.default)),
    Line("amax", (aten.amax.default,)),
    Line("amin", (aten.amin.default,)),
    Line("softmax", (aten._softmax.default,), "x, dim, half_to_float=False"),  # noqa: SLF001
    Line("log_softmax", (aten._log_softmax.default,), "x, dim, half_to_float=False"),  # noqa: SLF001
]

OVERLOADS = [line for line in (*SHAPE, *INDEXED, *POINTWISE, *REDUCTIONS) if find_rule(line.op) is not None]

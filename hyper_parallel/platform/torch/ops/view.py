"""PyTorch's spellings of views, of copies of views, of concatenation and of splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.shard.entry import binder
from hyper_parallel.core.shard.rule import Rule, find_rule, rule_names
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, signature_of, spelling

spelling("view", "view", "reshape", signature="x, *shape", canonical=True)
spelling("view", aten.view.default, aten._unsafe_view.default, aten.reshape.default, canonical=True)
spelling("as_strided")
spelling("flatten")
spelling("unflatten")
spelling("view_as", Tensor.view_as, Tensor.reshape_as)
spelling("view_as_real", torch.view_as_real, aten.view_as_real.default)
spelling("view_as_complex", torch.view_as_complex, aten.view_as_complex.default)


@decomposition("ravel", signature="x")
def _ravel(_ops: Any, x: Any) -> Any:
    """Return a copy if the elements are not contiguous, also of a vector with gaps, which ``reshape`` would view."""
    return x.contiguous().view(-1)


@kernel("view")
def _view(x: Tensor, shape: Any) -> Tensor:
    return x.reshape(shape)


def _copy_of_view(op: str, name: str) -> None:
    """Register ``torch.<name>``, which returns a copy of the view that operator ``op`` returns."""
    starred = binder(signature_of(op)).starred

    @decomposition(name, signature=signature_of(op))
    def run(ops: Any, x: Any, **rest: Any) -> Any:
        sizes = () if starred is None else rest.pop(starred)
        views = getattr(ops, op)(x, *sizes, **rest)
        return tuple(view.clone() for view in views) if isinstance(views, tuple) else views.clone()


for _op in rule_names():
    _rule = find_rule(_op)
    if isinstance(_rule, Rule) and _rule.view and hasattr(torch, f"{_op}_copy"):
        _copy_of_view(_op, f"{_op}_copy")
_copy_of_view("split", "split_with_sizes_copy")


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


# -- parts that share memory without autograd knowing it ---------------------------------------------------------------


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
    """Refuse writes to ``parts``: neither gradients nor earlier redistributed copies would follow them."""
    for part in parts:
        part._readonly = part._readonly or (
            f"it is a part by unsafe_{safe}, and autograd does not see writes to it; use {safe}, or write to a clone()"
        )
    return parts

"""PyTorch's spellings of views that change the shape, and of the copies that it makes of views."""

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
    """A copy where the elements do not lie in order, also of a vector with gaps, which ``reshape`` views."""
    return x.contiguous().view(-1)


@kernel("view")
def _view(x: Tensor, shape: Any) -> Tensor:
    return x.reshape(shape)


def _copy_of_view(op: str, name: str) -> None:
    """Let ``torch.<name>`` be a copy of the view that operator ``op`` returns."""
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

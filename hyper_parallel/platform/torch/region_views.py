"""Removes views without effect from a joint graph, because each of them would cost a call on the host.

Autograd and the tracer produce many: ``t`` of ``t``, ``detach``, a view with the tensor's own shape, and the same view
again for each operator that reads it. A traced graph writes to no tensor, so equal views can be merged.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

__all__ = ["remove_idle_views"]

_ATEN = torch.ops.aten
_RESHAPES = tuple(getattr(_ATEN, name).default for name in ("view", "_unsafe_view"))
_SAME_IN_PLACE = (*_RESHAPES, _ATEN.expand.default)
_SAME_DATA = (_ATEN.detach.default, _ATEN.alias.default)
_SWAPS = (_ATEN.t.default, _ATEN.transpose.int)
_VIEWS = frozenset((*_SAME_IN_PLACE, *_SAME_DATA, *_SWAPS, _ATEN.permute.default, _ATEN.as_strided.default))


def remove_idle_views(graph: fx.Graph, outputs: int, backward: Collection[fx.Node]) -> None:
    """Make each operator of ``graph`` read the first of equal tensors, and merge successive reshapes.

    Args:
        graph: graph of forward and backward; its outputs are those of forward, then the gradients.
        outputs: number of outputs of forward, which stay views.
        backward: the nodes of backward; a gradient that is a view of one of these may be replaced by the node itself.
    """
    first: dict[Any, fx.Node] = {}
    equal: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "output":
            node.args = (_results(node.args[0], outputs, {n: same for n, same in equal.items() if same in backward}),)
        elif node.op == "call_function":
            node.args = fx.map_arg(node.args, lambda each: equal.get(each, each))
            node.kwargs = fx.map_arg(node.kwargs, lambda each: equal.get(each, each))
            if node.target in _VIEWS:
                _reshape_once(node)
                same = _viewed(node) or first.setdefault((node.target, _key(node.args)), node)
                if same is not node:
                    equal[node] = same
    graph.eliminate_dead_code()


def _results(results: Any, outputs: int, equal: dict[fx.Node, fx.Node]) -> list[Any]:
    return [*results[:outputs], *(equal.get(result, result) for result in results[outputs:])]


def _viewed(view: fx.Node) -> fx.Node | None:
    """Return the tensor that ``view`` is equal to, or None."""
    base: Any = view.args[0]
    if view.target in _SAME_DATA or (view.target in _SAME_IN_PLACE and _form(view) == _form(base)):
        return base
    if view.target in _SWAPS and base.target is view.target and _dims(view) == _dims(base):
        whole: fx.Node = base.args[0]
        return whole
    return None


def _reshape_once(view: fx.Node) -> None:
    """Make a reshape of a reshape read the original tensor, if that can be viewed in the final shape."""
    base: Any = view.args[0]
    if view.target in _RESHAPES and base.target in _RESHAPES:
        shape, strides = _form(base.args[0])
        try:
            direct = torch.empty_strided(shape, strides, device="meta").view(_form(view)[0])
        except (RuntimeError, ValueError):  # the latter while PyTorch traces
            return
        if direct.stride() == _form(view)[1]:
            view.args = (base.args[0], *view.args[1:])


def _form(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    value = node.meta["val"]
    return tuple(value.shape), value.stride()


def _dims(swap: fx.Node) -> frozenset[int]:
    ndim = swap.meta["val"].ndim
    return frozenset(dim % ndim for dim in swap.args[1:] if isinstance(dim, int))


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else (type(value), value)

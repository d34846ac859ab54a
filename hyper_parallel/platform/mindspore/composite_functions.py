"""Makes MindSpore's composite functions picklable: modules hold them, and are pickled to be sent to other ranks."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from mindspore.ops import GradOperation, HyperMap, Map, MultitypeFuncGraph

__all__ = ["make_picklable"]

_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def make_picklable() -> None:
    """Register how ``GradOperation``, ``HyperMap``, ``Map`` and ``MultitypeFuncGraph`` are pickled.

    Two attributes that MindSpore does not expose are lost: the name of a ``MultitypeFuncGraph``, which only appears in
    messages, and ``reverse`` of maps, which only orders the code of compiled graphs.
    """
    copyreg.pickle(MultitypeFuncGraph, _reduce_graph)
    for kind in (HyperMap, Map):
        copyreg.pickle(kind, _reduce_map)
    copyreg.pickle(GradOperation, _reduce_gradient)


def _reduce_graph(graph: MultitypeFuncGraph) -> tuple[Any, ...]:
    entries = [(tuple(str(kind) for kind in kinds), function) for kinds, function in graph.entries]
    return MultitypeFuncGraph, ("restored",), (entries, graph.default_func), None, None, _register


def _register(graph: MultitypeFuncGraph, state: tuple[list[tuple[tuple[str, ...], Any]], Any]) -> None:
    """Register functions again once the graph exists, since they may call it."""
    entries, graph.default_func = state
    for kinds, function in entries:
        graph.register(*kinds)(function)


def _reduce_map(mapped: HyperMap | Map) -> _Reduced:
    return type(mapped), (mapped.ops,)


def _reduce_gradient(gradient: GradOperation) -> _Reduced:
    return GradOperation, (gradient.get_all, gradient.get_by_list, gradient.sens_param)

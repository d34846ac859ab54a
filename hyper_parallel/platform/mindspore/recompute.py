"""MindSpore's own ways to recompute, which return to the state of its generator and know none of the DTensors'.

``mindspore.recompute`` and ``Cell.recompute`` make a ``_RecomputeHandle`` per forward where backward is not reentrant,
and call a ``_RecomputeCell`` where it is. Both are replaced in place, so it does not matter who imported what before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspore.common.recompute import _RecomputeCell, _RecomputeHandle

from hyper_parallel.core.dtensor import random
from hyper_parallel.platform.contract.memory import rerunning

__all__ = ["install"]

_STATES = "_hyper_parallel_states"


def install() -> None:
    """Let recomputed cells draw again what DTensors drew; called once, by the platform's construction."""
    handle: Any = _RecomputeHandle  # the one door of all that is not reentrant
    handle.__init__ = rerunning(handle.__init__, random.get_state, random.replaying)
    cell: Any = _RecomputeCell  # and of all that is
    cell.construct, cell.bprop = _remembering(cell.construct), _replaying(cell.bprop)


def _remembering(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward, which keeps its arguments on a stack; the state goes on one beside it."""

    @wraps(plain)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault(_STATES, []).append(random.get_state())
        return plain(self, *args, **kwargs)

    return construct


def _replaying(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The backward, which runs the forward again on the arguments that it takes from the stack."""

    @wraps(plain)
    def bprop(self: Any, *args: Any) -> Any:
        with random.replaying(self.__dict__[_STATES].pop()):
            return plain(self, *args)

    return bprop

"""PyTorch's own ways to recompute, which return to the state of its generators and know none of the DTensors'.

Whatever recomputes without reentrant backward makes a ``_CheckpointFrame``, before forward runs; whatever does it
with, applies ``CheckpointFunction``. Both are replaced in place, so it does not matter who imported what before. Where
others recompute, drawing anew is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils import checkpoint

from hyper_parallel.core.dtensor import random
from hyper_parallel.platform.contract.memory import replayed, rerunning

__all__ = ["install"]

_DONE = "_hyper_parallel_replays"


def install() -> None:
    """Let recomputed functions draw again what DTensors drew; again does nothing new."""
    if hasattr(checkpoint.CheckpointFunction, _DONE):
        return
    frame: Any = checkpoint._CheckpointFrame  # noqa: SLF001 - the one door of all that is not reentrant
    frame.__init__ = rerunning(frame.__init__, random.get_state, random.replaying)
    function: Any = checkpoint.CheckpointFunction
    function.forward = staticmethod(_replaying(function.forward))
    setattr(function, _DONE, True)
    random.forbid_sampling_while(_reruns)


def _reruns() -> bool:
    """True where backward records operations: a forward runs again, by some other way than the two."""
    return torch._C._current_graph_task_id() >= 0 and torch.is_grad_enabled()  # noqa: SLF001 - no public spelling


def _replaying(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return plain(ctx, replayed(run_function, random.get_state, random.replaying), *args)

    return forward

"""``torch.masked``: compositions in Python that PyTorch does not announce, and that look at a tensor's storage format.

They are made of operators that have rules. All they lack is the answer to ``x.layout == torch.strided``, where a
DTensor's ``layout`` is its placement; so each is replaced by itself with that question answered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.dispatch import implicit_replication
from hyper_parallel.platform.torch.dtensor import STORAGE_FORMAT

__all__ = ["install"]

_REPLACED = "_hyper_parallel_masked"


def install() -> None:
    """Replace the functions of ``torch.masked``; again does nothing new."""
    inner: Any = torch.masked._ops  # noqa: SLF001 - where the functions live
    for name in torch.masked.__all__:
        func = getattr(inner, name, None)
        if type(func) is FunctionType and not hasattr(func, _REPLACED):
            opened = _opened(func)
            setattr(torch.masked, name, opened)
            setattr(inner, name, opened)


def _opened(func: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        distributed = sum(isinstance(one, DTensor) for one in tensors)
        if not distributed:
            return func(*args, **kwargs)
        # Whoever mixes in tensors of their own is told so; those that the function makes itself are constants.
        constants = implicit_replication() if distributed == len(tensors) else nullcontext()
        token = STORAGE_FORMAT.set(True)
        try:
            with constants:
                return func(*args, **kwargs)
        finally:
            STORAGE_FORMAT.reset(token)

    setattr(call, _REPLACED, True)
    return call

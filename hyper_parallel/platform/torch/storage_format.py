"""Composite functions of PyTorch that read ``x.layout``: they get the storage format, not a layout of this library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import FunctionType
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.dispatch import implicit_replication
from hyper_parallel.platform.torch.dtensor import STORAGE_FORMAT
from hyper_parallel.platform.torch.versions import masked_functions, tree_leaves

__all__ = ["functions_of_masked", "pair_with_storage_format", "with_storage_format"]

Call = Callable[..., Any]


def with_storage_format(function: Call) -> Call:
    """Return ``function``, changed to read the storage format as ``x.layout`` of a DTensor.

    If all its tensor arguments are DTensors, constants that it creates count as replicated.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        distributed = sum(isinstance(tensor, DTensor) for tensor in tensors)
        if not distributed:
            return function(*args, **kwargs)
        # A caller's plain tensors are refused; those that the function makes itself are constants.
        constants = implicit_replication() if distributed == len(tensors) else nullcontext()
        token = STORAGE_FORMAT.set(True)
        try:
            with constants:
                return function(*args, **kwargs)
        finally:
            STORAGE_FORMAT.reset(token)

    return call


def functions_of_masked() -> list[str]:
    """Names of the functions of ``torch.masked`` that are written in Python."""
    inner = vars(masked_functions)
    return [name for name in torch.masked.__all__ if isinstance(inner.get(name), FunctionType)]


def pair_with_storage_format(method: Call) -> Call:
    """Return a method of PyTorch's pair of compared tensors, changed like :func:`with_storage_format`."""

    @wraps(method)
    def call(pair: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (*args, *(getattr(pair, name, None) for name in ("actual", "expected")))
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return method(pair, *args, **kwargs)
        token = STORAGE_FORMAT.set(True)
        try:
            return method(pair, *args, **kwargs)
        finally:
            STORAGE_FORMAT.reset(token)

    return call

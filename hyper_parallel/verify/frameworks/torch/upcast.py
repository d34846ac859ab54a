"""Runs a PyTorch program in a wider dtype: what it computes in bfloat16 or float16 is computed in float32.

Half precision hides errors of a few percent behind its rounding. The same program in float32 shows them. Dtypes are
replaced where a program names them: in calls of tensors and factories, by autocast, and in policies of mixed precision.
Tensors that are loaded from a file keep their dtype until the program casts them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["is_upcast", "upcast", "without_autocast", "without_half_precision"]

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_UPCAST: ContextVar[bool] = ContextVar("hyper_parallel_upcast", default=False)


def is_upcast() -> bool:
    """Return whether the program of this context runs in a wider dtype."""
    return _UPCAST.get()


@contextmanager
def upcast() -> Iterator[None]:
    """Inside, this thread computes in float32 what the program asks to compute in half precision."""
    token = _UPCAST.set(True)
    try:
        with _Wider():
            yield
    finally:
        _UPCAST.reset(token)


class _Wider(TorchFunctionMode):
    """Replaces dtypes in the arguments of PyTorch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with wider dtypes."""
        if func in _CASTS:
            return args[0].float()
        wider = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **wider)


_CASTS = frozenset((torch.Tensor.half, torch.Tensor.bfloat16))


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def without_autocast(plain: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of ``torch.autocast``, which is switched off in a wider dtype."""

    def constructor(
        autocast: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        plain(autocast, device_type, dtype, enabled and not is_upcast(), *args, **kwargs)

    constructor.__name__ = "__init__"  # which tracebacks show
    return constructor


def without_half_precision(plain: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of a frozen policy of mixed precision, whose dtypes are wider."""

    def constructor(policy: Any, *args: Any, **kwargs: Any) -> None:
        plain(policy, *args, **kwargs)
        if is_upcast():
            for field in dataclasses.fields(policy):
                object.__setattr__(policy, field.name, _wider(getattr(policy, field.name)))

    constructor.__name__ = "__init__"  # which tracebacks show
    return constructor

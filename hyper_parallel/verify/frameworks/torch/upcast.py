"""Runs a PyTorch program in a wider dtype: half precision in float32, or all narrower dtypes in float64.

Rounding errors of half precision hide wrong values of a few percent; so do those of float32 in a program that amplifies
them. The same program in a wider dtype exposes such wrong values. Dtypes are replaced where a program names them: in
calls of functions and methods, in autocast, and in policies of mixed precision. Tensors that are loaded from a file, or
made from arrays, keep their dtype until the program casts them, or computes with them and with tensors of float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["is_upcast", "upcast", "widened", "without_autocast", "without_half_precision"]

_HALF = (torch.bfloat16, torch.float16)
_WIDER = {
    "float32": dict.fromkeys(_HALF, torch.float32),
    "float64": dict.fromkeys((*_HALF, torch.float32), torch.float64),
}
"""Replacement of each dtype, by the name of the wider dtype that was requested."""

_UPCAST: ContextVar[str] = ContextVar("hyper_parallel_upcast", default="")


def is_upcast() -> bool:
    """Return whether the program of this context runs in a wider dtype."""
    return bool(_UPCAST.get())


@contextmanager
def upcast(dtype: str) -> Iterator[None]:
    """Context in which this thread computes in a wider dtype than the program requests.

    Args:
        dtype: ``float32`` or ``float64``; empty changes nothing.
    """
    if not dtype:
        yield
        return
    token, plain = _UPCAST.set(dtype), torch.get_default_dtype()  # the transport keeps it for each rank
    try:
        torch.set_default_dtype(torch.float64 if dtype == "float64" else plain)
        with _Wider(dtype):
            yield
    finally:
        torch.set_default_dtype(plain)
        _UPCAST.reset(token)


class _Wider(TorchFunctionMode):
    """Replaces dtypes in the arguments of PyTorch's functions.

    Args:
        dtype: ``float32`` or ``float64``.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._widest: torch.dtype = getattr(torch, dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with wider dtypes; for ``float64``, also convert its tensors to one dtype."""
        if func in _CASTS:
            return args[0].to(self._widest)
        wider = {name: _wider(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(_wider, args))
        writes = getattr(func, "__name__", "_").endswith("_")  # copy_(), __setitem__(), __set__()
        dtypes = {value.dtype for value in (*args, *wider.values()) if isinstance(value, torch.Tensor)}
        if self._widest == torch.float64 and not writes and {torch.float32, torch.float64} <= dtypes:
            args = tuple(map(_doubled, args))
            wider = {name: _doubled(value) for name, value in wider.items()}
        return func(*args, **wider)


_CASTS = frozenset((torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float))


def _wider(value: Any) -> Any:
    return _WIDER[_UPCAST.get()].get(value, value) if isinstance(value, torch.dtype) and is_upcast() else value


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def widened(value: Any) -> Any:
    """Return an input of the program's model, converted to the dtype in which the model computes."""
    return _doubled(value) if _UPCAST.get() == "float64" else value


def without_autocast(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of ``torch.autocast`` that disables autocast while the program runs in a wider dtype."""

    def constructor(
        autocast: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        plain(autocast, device_type, dtype, enabled and not is_upcast(), *args, **kwargs)

    constructor.__name__ = "__init__"  # shown in tracebacks
    return constructor


def without_half_precision(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of a (frozen) policy of mixed precision that replaces the policy's dtypes by wider ones."""

    def constructor(policy: Any, *args: Any, **kwargs: Any) -> None:
        plain(policy, *args, **kwargs)
        if is_upcast():
            for field in dataclasses.fields(policy):
                object.__setattr__(policy, field.name, _wider(getattr(policy, field.name)))

    constructor.__name__ = "__init__"  # shown in tracebacks
    return constructor

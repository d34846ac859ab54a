"""Where PyTorch's calls on DTensors arrive: function level first, operator level for what has no rule there.

A function without a rule runs as PyTorch wrote it, in C++, and its operators arrive one by one below autograd's keys.
There the dispatch state from before autograd is restored, so that each local operation records itself: composite
functions decompose by themselves and stay differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import enable_reentrant_dispatch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.dispatch import Dispatcher, Entry
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["dispatcher", "function", "operator", "overload_entries"]

_disabled = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - documented in PyTorch's extending guide


@cache
def dispatcher() -> Dispatcher:
    """PyTorch's dispatcher."""
    return Dispatcher(get_torch_platform())


@cache
def _tables() -> tuple[dict[Any, Entry], dict[Any, Entry], dict[Any, Callable[..., Any]]]:
    from hyper_parallel.platform.torch import op_table  # noqa: PLC0415 - the table imports the rules

    return op_table.functions(), op_table.overloads(), op_table.decompositions()


def overload_entries() -> dict[Any, Entry]:
    """Entries by operator overload."""
    return _tables()[1]


def function(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch a call of the Python API."""
    del types
    functions, _, decompositions = _tables()
    entry = functions.get(func)
    if entry is not None:
        return dispatcher().dispatch(entry, args, kwargs)
    decomposition = decompositions.get(func)
    if decomposition is not None:
        return decomposition(*args, **kwargs)
    with _disabled():
        return func(*args, **kwargs)


def operator(func: OpOverload[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch an operator overload that arrived from C++."""
    del types
    entry = _tables()[1].get(func)
    if entry is None:
        raise UnsupportedOperatorError(_message(func, args, kwargs))
    with enable_reentrant_dispatch():
        return dispatcher().dispatch(entry, args, kwargs)


def _message(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    seen = ", ".join(
        f"{one._layout.notation(one.dtype)}"  # noqa: SLF001
        for one in torch.utils._pytree.tree_leaves((args, kwargs))  # noqa: SLF001 - the public tree_leaves came later
        if isinstance(one, DTensor)
    )
    return (
        f"operator {func} has no sharding rule (layouts: {seen}); "
        "add one with hyper_parallel.DistributedOp, or run it whole: x = x.redistribute() on every operand, then "
        "to_local(), the operation, and DTensor.from_local(result, mesh)"
    )

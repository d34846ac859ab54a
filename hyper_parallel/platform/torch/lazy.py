"""A tensor whose values are still under way: whatever reads it first waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["PendingTensor", "lazy"]

# What may be asked without waiting.
_FACTS = frozenset({"shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "layout", "_version"})
_FACT_METHODS = frozenset({"size", "dim", "numel", "is_floating_point", "is_complex", "element_size"})


class PendingTensor(torch.Tensor):
    """A tensor over the output of a collective in flight; operations see the plain tensor, once it is complete."""

    _plain: torch.Tensor
    _pending: Any

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait, unless only facts are asked; then go on with plain tensors."""
        del types
        name = getattr(func, "__name__", "")
        fact = name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _FACTS
        settle = _plain_of if fact or name in _FACT_METHODS else _settled
        args, kwargs = pytree.tree_map_only(PendingTensor, settle, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def lazy(output: torch.Tensor, pending: Any) -> torch.Tensor:
    """``output``, on its graph, such that ``pending`` is waited for before anything reads it."""
    made = output.as_subclass(PendingTensor)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the documented way to touch a subclass' own state
        made._plain, made._pending = output, pending  # noqa: SLF001 - this module's own class
    return made


def _plain_of(one: PendingTensor) -> torch.Tensor:
    return one.__dict__["_plain"]


def _settled(one: PendingTensor) -> torch.Tensor:
    held = one.__dict__
    pending = held["_pending"]
    if pending is not None:
        held["_pending"] = None
        pending.wait()
    return held["_plain"]

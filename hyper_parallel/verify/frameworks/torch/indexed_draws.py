"""Lets random functions on plain PyTorch tensors draw numbers as DTensors do, by global element index."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.torch.intercept import RECORDED
from hyper_parallel.platform.torch.versions import execution_engine, tree_leaves, tree_map

__all__ = ["IndexedDraws"]

_ATTENTION = F.scaled_dot_product_attention  # kept here, because a recording replaces the name
_DROPOUTS = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
        _ATTENTION, torch.dropout, torch.feature_dropout, torch.alpha_dropout,
        torch.feature_alpha_dropout,
    }
)  # fmt: skip
"""Functions that draw only if their dropout probability is above zero, or only in training mode."""

_SAMPLERS = frozenset(
    {
        F.gumbel_softmax, torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, Tensor.bernoulli,
        torch.multinomial, Tensor.multinomial, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_,
        Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_,
    }
)  # fmt: skip


class IndexedDraws(TorchFunctionMode):
    """Context in which random functions on plain tensors draw from the random stream of DTensors.

    For the call, the tensors are made DTensors. Only the shard of this rank is drawn.

    Args:
        place: returns mesh, placements and global shape of a plain tensor to draw for; called before the draw.
    """

    def __init__(self, place: Callable[[Any], tuple[Any, Any, Any]]) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call; if it draws random numbers, draw them by index."""
        kwargs = kwargs or {}
        func = getattr(func, RECORDED, func)
        if func in (Tensor.backward, getattr(torch.autograd.backward, RECORDED, torch.autograd.backward)):
            return self._backward(func, types, args, kwargs)
        if func not in _SAMPLERS and not (func in _DROPOUTS and _is_active(func, args, kwargs)):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors or any(isinstance(tensor, DTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            inplace, args, kwargs = _without_inplace(func, args, kwargs)
            result = self._drawn(func, args, kwargs)
            return args[0].copy_(result) if inplace else result
        result = self._drawn(func, args, kwargs)
        return args[0] if func.__name__.endswith("_") else result

    def _backward(self, func: Any, types: Any, args: Any, kwargs: Any) -> None:
        """Run backward with this mode enabled for recomputed forwards; PyTorch disables a mode inside its own calls."""
        values = _bound(func, args, kwargs)
        losses = values.get("tensors", values.get("self"))
        loss: Any = losses[0] if isinstance(losses, (tuple, list)) and len(losses) == 1 else losses
        if isinstance(loss, DTensor):
            kind: Any = type(loss)
            with self:
                kind.__torch_function__(func, types, args, kwargs)
            return
        gradient = values.get("grad_tensors", values.get("gradient"))
        keep = values["create_graph"] if values["retain_graph"] is None else values["retain_graph"]
        plain = isinstance(loss, Tensor) and loss.numel() == 1 and gradient is None and values["inputs"] is None
        if not plain:  # not the backward of a scalar loss: recomputed forwards then draw from PyTorch's generator
            func(*args, **kwargs)
            return
        with self:
            if func is Tensor.backward:  # a recording observes the function that the method calls
                torch.autograd.backward(loss, retain_graph=keep, create_graph=values["create_graph"])
                return
            execution_engine.run_backward(
                (loss,), (torch.ones_like(loss),), keep, values["create_graph"], (), allow_unreachable=True,
                accumulate_grad=True,
            )  # fmt: skip

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        place: list[Any] = []

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not place:
                place.extend((*self._place(leaf), leaf.shape))
            mesh, placements, whole, shape = place
            return DTensor.from_local(leaf, mesh, placements, shape=whole if leaf.shape == shape else None)

        results = func(*tree_map(wrapped, args), **tree_map(wrapped, kwargs))
        return tree_map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, results)


def _is_active(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of a dropout function draws random numbers."""
    if func is _ATTENTION:
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0
    if func is F.rrelu:
        return bool(_bound(func, args, kwargs)["training"])
    if func.__module__ == F.__name__:
        values = _bound(func, args, kwargs)
        return bool(values["training"]) and values["p"] > 0
    probability, train = (*args, *kwargs.values())[1:3]
    return bool(train) and probability > 0


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _without_inplace(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any, Any]:
    """Return whether a call writes into its operand, and the arguments of the out-of-place call."""
    if func.__module__ != F.__name__ or func is _ATTENTION:
        return False, args, kwargs
    values = _bound(func, args, kwargs)
    first, *rest = values.items()
    inplace = bool(values.get("inplace"))
    return inplace, (first[1],), {name: False if name == "inplace" else value for name, value in rest}

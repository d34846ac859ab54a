"""Facet *differentiable* on PyTorch, and tensors that wait for their collective when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from hyper_parallel.platform.contract.differentiable import DifferentiableFacet
from hyper_parallel.platform.torch.versions import DisableTorchFunctionSubclass, inside_forward_ad, pytree

__all__ = ["AsyncTensor", "TorchDifferentiable", "async_tensor"]


class TorchDifferentiable(DifferentiableFacet):
    """Collectives with gradients, on PyTorch's tape."""

    def has_tangent(self, local: Any) -> bool:
        """Whether it is a dual tensor of ``forward_ad``, which ``torch.func.jvp`` makes as well."""
        return inside_forward_ad() and forward_ad.unpack_dual(local).tangent is not None

    def _awaited_on_use(self, output: Any, pending: Any) -> Any:
        """A tensor whose first use waits for the collective ``pending``."""
        return async_tensor(output, pending)


# -- outputs of collectives in flight ----------------------------------------------------------------------------------

# What may be read without waiting.
_METADATA = frozenset({"shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "layout", "_version"})
_METADATA_METHODS = frozenset({"size", "dim", "numel", "is_floating_point", "is_complex", "element_size"})


class AsyncTensor(torch.Tensor):
    """A tensor over the output of a collective in flight; operations run on the plain tensor, once it is complete."""

    _plain: torch.Tensor
    _pending: Any

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait, unless only metadata is read; then go on with plain tensors."""
        del types
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        unwrap = _plain_of if attribute in _METADATA or name in _METADATA_METHODS else _completed
        args, kwargs = pytree.tree_map_only(AsyncTensor, unwrap, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def async_tensor(output: torch.Tensor, pending: Any) -> torch.Tensor:
    """Return ``output``, on its graph, such that whatever reads it first waits for ``pending``."""
    tensor = output.as_subclass(AsyncTensor)
    with DisableTorchFunctionSubclass():  # the documented way to touch a subclass' own state
        tensor._plain, tensor._pending = output, pending  # noqa: SLF001 - this module's own class
    return tensor


def _plain_of(tensor: AsyncTensor) -> torch.Tensor:
    return tensor.__dict__["_plain"]


def _completed(tensor: AsyncTensor) -> torch.Tensor:
    state = tensor.__dict__
    pending = state["_pending"]
    if pending is not None:
        state["_pending"] = None
        pending.wait()
    return state["_plain"]

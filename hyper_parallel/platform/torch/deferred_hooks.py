"""Hooks of parameters whose gradients are complete only after autograd has computed them.

Autograd calls the hooks of a leaf once it has this rank's gradient, or never if the leaf is a shard. The hooks are
kept here instead, and the code that reduces the gradient calls them with the reduced gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

from hyper_parallel.errors import PlanError, UnsupportedOperatorError
from hyper_parallel.platform.torch.dtensor import TorchDTensor

__all__ = [
    "DeferredHooks",
    "computed_with",
    "edge_of",
    "local_leaf",
    "node_of",
    "refuse_earlier_hooks",
    "refuse_unreduced",
]

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_EARLY = "early"  # key of the hook that autograd calls; keys of users' hooks are numbers


def local_leaf(parameter: Any) -> torch.Tensor:
    """Return the leaf that has the gradient; for a DTensor, its local tensor."""
    leaf: torch.Tensor = parameter._local if isinstance(parameter, TorchDTensor) else parameter
    return leaf


class _Hooks(dict[Any, Callable[..., Any]]):
    """Replaces a leaf's dict of hooks: autograd sees the library's hooks, and users' hooks are kept in ``deferred``.

    Args:
        existing: the dict to replace; its hooks are deferred, too.
        added: called when a hook is registered.
        computed_with: see :class:`DeferredHooks`.
    """

    def __init__(
        self,
        existing: dict[Any, Callable[..., Any]] | None,
        added: Callable[[], None],
        computed_with: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.existing = {} if existing is None else existing
        self.computed_with = computed_with
        self.deferred: dict[Any, Callable[..., Any]] = {}
        self._added = added

    def __setitem__(self, key: Any, hook: Callable[..., Any]) -> None:
        self.deferred[key] = hook
        self._added()

    def __contains__(self, key: Any) -> bool:
        return key in self.deferred

    def __delitem__(self, key: Any) -> None:
        del self.deferred[key]

    def hooks(self) -> list[Callable[..., Any]]:
        """The hooks of users, in the order of registration."""
        return [*self.existing.values(), *self.deferred.values()]


class DeferredHooks:
    """The hooks that users register on one leaf.

    Args:
        leaf: a tensor in which autograd accumulates a gradient, or its replacement.
        early: called with the gradient before autograd accumulates one in ``leaf``, if there are hooks.
        computed_with: the leaf of the graph whose gradient is reduced to that of ``leaf``, if they differ.
    """

    def __init__(
        self,
        leaf: torch.Tensor,
        early: Callable[[torch.Tensor], None],
        computed_with: torch.Tensor | None = None,
    ) -> None:
        self._leaf, self._early = leaf, early
        self._gradient, self._accumulated = (_Hooks(getattr(leaf, kind), self._watch, computed_with) for kind in _KINDS)
        leaf._backward_hooks = self._gradient
        leaf._post_accumulate_grad_hooks = self._accumulated
        if self:
            self._watch()

    def __bool__(self) -> bool:
        """Whether there are hooks."""
        return bool(self._gradient.hooks() or self._accumulated.hooks())

    def _watch(self) -> None:
        dict.__setitem__(self._gradient, _EARLY, self._early_if_hooked)

    def _early_if_hooked(self, gradient: torch.Tensor) -> None:
        if self:
            self._early(gradient)

    def after_accumulation(self, call: Callable[[torch.Tensor], None]) -> None:
        """Make autograd call ``call``, a function of the library, when it has accumulated a gradient."""
        dict.__setitem__(self._accumulated, _EARLY, call)

    def changed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` after the hooks of ``register_hook``.

        Raises:
            RuntimeError: a hook did not return a gradient of that shape.
        """
        for hook in self._gradient.hooks():
            result = hook(gradient)
            if result is None:
                continue
            if not isinstance(result, torch.Tensor) or result.shape != gradient.shape:
                msg = f"hook {getattr(hook, '__name__', hook)!r} must return a tensor of shape {list(gradient.shape)}"
                raise RuntimeError(msg)
            gradient = result
        return gradient

    def announce(self) -> None:
        """Call the hooks of ``register_post_accumulate_grad_hook``."""
        for hook in self._accumulated.hooks():
            hook(self._leaf)

    def refuse(self, why: str) -> None:
        """Raise if there are hooks, which would not be called.

        Raises:
            PlanError: there are hooks; ``why`` is the reason.
        """
        if self:
            msg = f"{why}, and its hooks would not be called as on one device; remove them, or use other hooks"
            raise PlanError(msg)


def refuse_earlier_hooks(parameter: Any, path: str, event: str) -> None:
    """Refuse to replace a parameter that has hooks, which would not be called.

    Args:
        parameter: parameter that is about to be replaced.
        path: name of the parameter.
        event: function after which hooks may be registered.

    Raises:
        PlanError: the parameter has hooks.
    """
    leaf = local_leaf(parameter)
    if any(getattr(leaf, kind, None) for kind in _KINDS):
        msg = (
            f"parameter {path} has hooks, which would not be called for the parameter that replaces it; register them "
            f"after {event}"
        )
        raise PlanError(msg)


def computed_with(parameter: Any) -> torch.Tensor | None:
    """Return the leaf that replaces ``parameter``, a shard of ``fully_shard``, in the graph; None for others."""
    hooks = getattr(local_leaf(parameter), "_backward_hooks", None)
    return hooks.computed_with if isinstance(hooks, _Hooks) else None


def refuse_unreduced(roots: Iterable[Any], parameters: Iterable[Any]) -> None:
    """Refuse to return gradients of shards, which are reduced only if they are accumulated.

    Args:
        roots: tensors at which backward begins.
        parameters: parameters whose gradients are requested.

    Raises:
        UnsupportedOperatorError: ``roots`` were computed with one of ``parameters``, a shard of ``fully_shard``.
    """
    wholes = {id(whole) for whole in map(computed_with, parameters) if whole is not None}
    pending = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)] if wholes else []
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wholes:
            msg = (
                "torch.autograd.grad: gradients of parameters of fully_shard are reduced into their grad; call "
                "backward(inputs=...), and read grad"
            )
            raise UnsupportedOperatorError(msg)
        pending += [following for following, _ in node.next_functions]


def node_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autograd.graph._get_grad_fn_or_grad_acc``, which gives a DTensor the node of its local tensor."""

    @wraps(plain)
    def call(tensor: Any) -> Any:
        leaf = local_leaf(tensor)
        if isinstance(getattr(leaf, "_backward_hooks", None), _Hooks):
            msg = (
                "register_multi_grad_hook: a parameter of fully_shard or replicate has its gradient after the graph "
                "has run; call register_hook on each tensor"
            )
            raise UnsupportedOperatorError(msg)
        return plain(leaf)

    return call


def edge_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autograd.graph.get_gradient_edge``, refused for DTensors."""

    @wraps(plain)
    def call(tensor: Any) -> Any:
        if isinstance(tensor, TorchDTensor):
            msg = (
                "get_gradient_edge of a DTensor: the graph is one of local tensors; use torch.autograd.grad with the "
                "tensor, or its register_hook"
            )
            raise UnsupportedOperatorError(msg)
        return plain(tensor)

    return call

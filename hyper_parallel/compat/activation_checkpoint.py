"""Recomputation and swapping of activations as functions on modules, and imperative gradients on MindSpore."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any

from hyper_parallel.compat.refusals import refused_function
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import framework_of, get_mindspore_platform, get_platform, platform_of_argument

__all__ = [
    "ActivationPolicy",
    "CheckpointPolicy",
    "SwapManager",
    "checkpoint_exclude_wrapper",
    "checkpoint_wrapper",
    "enable_mindspore_backward_compat",
    "swap_wrapper",
]


ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class CheckpointPolicy(Enum):
    """Treatment of an activation that backward needs."""

    MUST_SAVE = auto()
    MUST_SWAP = auto()
    SAVE = MUST_SAVE
    SWAP = MUST_SWAP


ActivationPolicy = CheckpointPolicy


def checkpoint_wrapper(
    module: Any,
    context_fn: ContextFunction | None = None,
    *,
    early_stop: bool = True,
    output_recompute: bool = False,
) -> Any:
    """Return a module or function like ``module`` whose activations are recomputed in backward.

    Args:
        module: a module, which is left unchanged and is ``unwrap_cell`` of the result, or a function.
        context_fn: returns the contexts of the forward and of the recomputation.
        early_stop: whether the recomputation may stop once backward has its activations; ignored, it always completes.
        output_recompute: whether to recompute the output too; must be false.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) ``output_recompute`` is set.
    """
    del early_stop
    if output_recompute:
        msg = "checkpoint_wrapper: output_recompute=True is not supported; leave communication recomputation off"
        raise UnsupportedOnBackend(msg)
    options = {} if context_fn is None else {"context_fn": context_fn}
    if not framework_of(module):
        run = get_platform().checkpoint
        return functools.wraps(module)(functools.partial(run, module, **options))
    platform = platform_of_argument(module, "checkpoint_wrapper: module", module=True)
    return _wrapped(platform.ckpt_wrapper(module, **options), module)


checkpoint_exclude_wrapper = refused_function(
    "checkpoint_exclude_wrapper",
    "outputs inside a recomputed module cannot be kept; leave the exclusions of recomputation empty",
)


def swap_wrapper(module: Any, policy_fn: Callable[[Any], CheckpointPolicy] | None = None) -> Any:
    """Return a module like ``module`` whose saved activations are swapped to slower memory until backward.

    Args:
        module: a module, which is left unchanged and is ``unwrap_cell`` of the result.
        policy_fn: decides for each saved tensor whether it is swapped; by default, tensors of at least 4,096 bytes are.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) ``module`` is a function.
    """
    if not framework_of(module):
        msg = f"swap_wrapper: {module!r} is not a module; swap the activations of the module that calls it"
        raise UnsupportedOnBackend(msg)
    platform = platform_of_argument(module, "swap_wrapper: module", module=True)

    def moves(tensor: Any) -> bool:
        return policy_fn is not None and policy_fn(tensor) is CheckpointPolicy.MUST_SWAP

    return _wrapped(platform.swap_wrapper(module, None if policy_fn is None else moves), module)


def _wrapped(wrapper: Any, module: Any) -> Any:
    vars(wrapper)["unwrap_cell"] = module  # not stored as an ordinary attribute, which would register a submodule
    return wrapper


class SwapManager:
    """Hints about the order of swapped modules. They have no effect: activations are moved back when needed."""

    def set_forward_prefetch_layer(self, first: Any, second: Any) -> None:
        """Declare that ``second`` runs after ``first``."""


def enable_mindspore_backward_compat() -> None:
    """Give MindSpore's tensors ``backward``, ``grad``, ``requires_grad`` and ``grad_fn``; once per process."""
    get_mindspore_platform().enable_imperative_gradients()

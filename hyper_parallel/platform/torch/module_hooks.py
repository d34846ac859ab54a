"""Backward hooks of modules whose inputs and outputs are DTensors: they get and return DTensors.

PyTorch passes a module's inputs and outputs through an identity, and hooks into its node. That node is on the graph of
the local tensors; arguments and results of hooks are converted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.torch.dtensor import wrap
from hyper_parallel.platform.torch.graph_nodes import LocalNode
from hyper_parallel.platform.torch.versions import BackwardHookFunction
from hyper_parallel.transport.base import active_transport_of

__all__ = [
    "entered_by_rank",
    "hook_identity",
    "hooks_with_dtensors",
    "local_gradient",
    "local_value",
    "of_entering_rank",
    "reduced",
    "refuse_old_hooks",
]

Call = Callable[..., Any]


def reduced(value: Any) -> Any:
    """Reduce pending averages and extrema, whose gradients are not those of sums; return other values unchanged."""
    if not isinstance(value, DTensor) or all(op == "sum" for _, op in value._layout.partials):
        return value
    return value.reduce_partial()


def local_value(value: Any) -> Any:
    """The local tensor of a DTensor; other values unchanged."""
    return value._local if isinstance(value, DTensor) else value


def local_gradient(what: str, result: Any, arg: Any) -> Any:
    """The local gradient of ``arg``, from the global gradient that user code returned.

    Raises:
        MixedTensorError: a plain gradient of a DTensor, or the reverse; ``what`` starts the message.
        LayoutError: a DTensor as the gradient of a value that is not a tensor, or a gradient of the wrong shape.
    """
    if result is None:
        return None
    if isinstance(arg, DTensor):
        return arg._as_gradient(result, what)  # noqa: SLF001 - of its own room
    if isinstance(result, DTensor):
        msg = f"{what} is a DTensor, the argument is a {type(arg).__name__}; return what to_local() gives"
        raise (MixedTensorError if isinstance(arg, torch.Tensor) else LayoutError)(msg)
    return result


def hook_identity(args: Sequence[Any]) -> tuple[Any, ...]:
    """``BackwardHookFunction.apply`` of tensors, DTensors among them."""
    results = BackwardHookFunction.apply(*map(local_value, args))
    return tuple(
        arg._alias(local) if isinstance(arg, DTensor) else local  # noqa: SLF001 - of its own room
        for arg, local in zip(args, results, strict=True)
    )


class _Node:
    """The node of the identity, whose hook gets DTensors where the identity's tensors are DTensors."""

    def __init__(self, node: Any, tensors: list[Any], what: str) -> None:
        self._node = node.autograds if isinstance(node, LocalNode) else node
        self._tensors, self._what = tensors, what

    def register_hook(self, hook: Call) -> Any:
        """Register a hook of PyTorch's own code, ``hook(grad_inputs, grad_outputs)``."""

        def on_locals(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            result = hook(self._wrapped(inputs), self._wrapped(outputs))
            return None if result is None else tuple(map(self._local, range(len(result)), result))

        return self._node.register_hook(on_locals)

    def _wrapped(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        pairs = zip(grads, self._tensors, strict=True)
        return tuple(
            grad if grad is None or not isinstance(tensor, DTensor) else wrap(grad, dual(tensor._layout))
            for grad, tensor in pairs
        )

    def _local(self, index: int, result: Any) -> Any:
        return local_gradient(f"{self._what}: gradient {index}", result, self._tensors[index])


def hooks_with_dtensors(apply: Call) -> Call:
    """``BackwardHook._apply_on_tensors``, for inputs or outputs that are DTensors, too."""

    @wraps(apply)
    def call(hook: Any, register: Call, args: tuple[Any, ...]) -> Any:
        if not any(isinstance(arg, DTensor) for arg in args):
            return apply(hook, register, args)
        values = [reduced(arg) for arg in args]
        entered = tuple(values) if type(args) is tuple else type(args)(*values)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        what = f"backward hook of {type(hook.module).__name__}"
        return apply(hook, lambda node: register(_Node(node, tensors, what)), entered)

    return call


def refuse_old_hooks(warn: Call) -> Call:
    """``Module._maybe_warn_non_full_backward_hook``, changed to refuse ``register_backward_hook`` for DTensors."""

    @wraps(warn)
    def call(module: Any, inputs: Any, result: Any, node: Any) -> None:
        tensors = [*(inputs if isinstance(inputs, tuple) else (inputs,)), *_tensors(result)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            msg = (
                f"register_backward_hook of {type(module).__name__}: its hook would see gradients of the last local "
                "operation, and not of the DTensors that go in and come out; use register_full_backward_hook"
            )
            raise UnsupportedOperatorError(msg)
        warn(module, inputs, result, node)

    return call


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


_RANK = "_hyper_parallel_rank"


def entered_by_rank(enter: Call) -> Call:
    """``__enter__`` of a context that hooks all modules; it records the simulated rank that enters."""

    @wraps(enter)
    def entered(context: Any) -> Any:
        vars(context)[_RANK] = active_transport_of("torch")
        return enter(context)

    return entered


def of_entering_rank(hook: Call) -> Call:
    """Return a hook of such a context that ignores modules of simulated ranks that did not enter the context."""

    @wraps(hook)
    def of_rank(context: Any, *args: Any, **kwargs: Any) -> Any:
        own = vars(context).get(_RANK) is active_transport_of("torch")
        return hook(context, *args, **kwargs) if own else None

    return of_rank

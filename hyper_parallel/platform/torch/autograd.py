"""``torch.autograd.grad``, ``torch.autograd.backward`` and custom autograd functions on DTensors.

The graph is on local tensors, so these functions must be applied to local tensors. ``torch.autograd.grad`` and
``torch.autograd.backward`` call ``__torch_function__`` like any function. ``torch.autograd.Function.apply`` does not:
unpatched it would take a DTensor for a tensor without gradient and drop the gradient silently (see ``patches.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from hyper_parallel._tree import as_list
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch import intercept
from hyper_parallel.platform.torch.deferred_hooks import computed_with, refuse_unreduced
from hyper_parallel.platform.torch.dtensor import wrap
from hyper_parallel.platform.torch.module_hooks import hook_identity, local_gradient, local_value, reduced
from hyper_parallel.platform.torch.versions import BackwardHookFunction, function_apply, native_apply, transforms_active

__all__ = ["LocalFunction", "apply_function", "backward", "dispatched_backward", "grad", "install"]

_plain_apply: Any = function_apply()
_ONCE = once_differentiable(lambda _: None).__code__
_NATIVE = "_hyper_parallel_native"


class LocalFunction(torch.autograd.Function):
    """PyTorch's ``autograd.Function`` without DTensor handling, for functions that never get a DTensor.

    Function transforms (vmap, jvp) need the Python half of ``apply``. If none is active, its look-ups would cost more
    than the node itself, so only the native half is called.
    """

    _native = native_apply()

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """See ``torch.autograd.Function``."""
        return _plain_apply(cls, *args, **kwargs) if transforms_active() or kwargs else cls._native(*args)


def install() -> None:
    """Intercept ``torch.autograd.grad`` and ``torch.autograd.backward``; it may be called again."""
    intercept.GRAPH_FUNCTIONS.update({torch.autograd.grad: grad, torch.autograd.backward: backward})


# -- grad and backward -------------------------------------------------------------------------------------------------


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward`` for DTensors and plain tensors."""
    roots, seeds = _rooted(tensors, grad_tensors if grad_tensors is not None else grad_variables, "backward")
    only = None if inputs is None else [_watched(leaf, "backward: inputs") for leaf in as_list(inputs)]
    if only is not None:  # gradients of fully_shard's shards are on the gathered parameters
        only += [whole for whole in map(computed_with, only) if whole is not None]
    torch.autograd.backward(roots, seeds, retain_graph=retain_graph, create_graph=create_graph, inputs=only)


def dispatched_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.autograd.backward`` such that it calls ``__torch_function__``, as in newer versions."""

    @wraps(original)
    def call(tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **options: Any) -> Any:
        given = [
            value for several in (tensors, grad_tensors, inputs) if several is not None for value in as_list(several)
        ]
        operands = tuple(value for value in given if isinstance(value, torch.Tensor))
        if has_torch_function(operands):
            return handle_torch_function(call, operands, tensors, grad_tensors, *args, inputs=inputs, **options)
        return original(tensors, grad_tensors, *args, inputs=inputs, **options)

    intercept.GRAPH_FUNCTIONS[call] = backward
    return call


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    is_grads_batched: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """``torch.autograd.grad``; the gradient of a DTensor is a DTensor in the dual layout."""
    if is_grads_batched:
        msg = "torch.autograd.grad: is_grads_batched is not supported for DTensors; call it once per cotangent"
        raise UnsupportedOperatorError(msg)
    roots, seeds = _rooted(outputs, grad_outputs, "grad")
    leaves = as_list(inputs)
    refuse_unreduced(roots, leaves)
    if options.get("create_graph"):
        for leaf in leaves:
            _refuse_partial(leaf, "grad: create_graph")
    grads = torch.autograd.grad(roots, [_watched(leaf, "grad: inputs") for leaf in leaves], seeds, **options)
    return tuple(
        wrap(grad, dual(leaf._layout)) if isinstance(leaf, DTensor) and isinstance(grad, torch.Tensor) else grad
        for grad, leaf in zip(grads, leaves, strict=True)
    )


def _rooted(tensors: Any, seeds: Any, what: str) -> tuple[list[Any], list[Any]]:
    outputs = as_list(tensors)
    cotangents = [None] * len(outputs) if seeds is None else as_list(seeds)
    if len(cotangents) != len(outputs):
        msg = f"{what}: {len(outputs)} tensors and {len(cotangents)} gradients given"
        raise RuntimeError(msg)
    pairs = [
        output._root(seed, what) if isinstance(output, DTensor) else (output, seed)  # noqa: SLF001
        for output, seed in zip(outputs, cotangents, strict=True)
    ]
    return [root for root, _ in pairs], [seed for _, seed in pairs]


def _refuse_partial(tensor: Any, what: str) -> None:
    """Reject partial tensors: their local gradients differ per rank, so second derivatives would be wrong."""
    if isinstance(tensor, DTensor) and tensor._layout.partials:
        msg = (
            f"{what}: the gradient of {tensor._layout.notation()} cannot be differentiated again; "
            "use x = x.reduce_partial() in its place"
        )
        raise UnsupportedOperatorError(msg)


def _watched(tensor: Any, what: str) -> Any:
    return tensor._watched(what) if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


# -- custom functions --------------------------------------------------------------------------------------------------


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.Function.apply`` that accepts DTensors, too."""
    for arg in args:
        if isinstance(arg, DTensor):
            return _on_dtensors(cls, args, kwargs)
    for arg in kwargs.values():
        if isinstance(arg, DTensor):
            return _on_dtensors(cls, args, kwargs)
    return _plain_apply(cls, *args, **kwargs)


class _Application:
    """One call of ``apply``: its arguments, and the layouts of its outputs."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.outputs: list[Any] = []
        self.many = False


def _on_dtensors(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply ``cls``, whose forward and backward get DTensors: both are computations on global tensors."""
    if issubclass(cls, BackwardHookFunction):
        return hook_identity(args)
    if kwargs:
        msg = f"{cls.__name__}.apply: with DTensors give every argument by position, got {', '.join(kwargs)} by name"
        raise TypeError(msg)
    call = _Application(tuple(map(reduced, args)))
    result = _native(cls).apply(*(local_value(arg) for arg in call.args), call)
    outs = [_wrapped(out, layout, call.args) for out, layout in zip(as_list(result), call.outputs, strict=True)]
    return tuple(outs) if call.many else outs[0]


def _wrapped(out: Any, layout: Any, args: Sequence[Any]) -> Any:
    if layout is None:
        return out
    for arg in args:
        if isinstance(arg, DTensor) and arg._local is out and arg._layout is layout:
            arg.drop_views()  # forward may have written it, and called mark_dirty
            return arg
    return wrap(out, layout)


class _Context:
    """The context of a user's function: PyTorch's own, except that DTensors are converted."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Whether each argument of the user's call needs a gradient."""
        return self._ctx.needs_input_grad[:-1]

    def save_for_backward(self, *tensors: Any) -> None:
        """Save the local tensors, whose versions PyTorch checks."""
        self._ctx.saved_layouts = [tensor._layout if isinstance(tensor, DTensor) else None for tensor in tensors]
        self._ctx.save_for_backward(*map(local_value, tensors))

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors that were saved, DTensors among them."""
        saved = zip(self._ctx.saved_tensors, self._ctx.saved_layouts, strict=True)
        return tuple(tensor if layout is None or tensor is None else wrap(tensor, layout) for tensor, layout in saved)

    def mark_dirty(self, *tensors: Any) -> None:
        """Mark arguments that forward wrote."""
        self._ctx.mark_dirty(*map(local_value, tensors))

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Mark outputs without gradient."""
        self._ctx.mark_non_differentiable(*map(local_value, tensors))


def _native(cls: Any) -> Any:
    """Return the function of local tensors for ``cls``; it is made once per class."""
    native = cls.__dict__.get(_NATIVE)
    if native is None:
        back = _backward_of(cls)
        native = type(cls.__name__, (LocalFunction,), {"forward": _forward_of(cls), "backward": back})
        setattr(cls, _NATIVE, native)
    return native


def _forward_of(cls: Any) -> Any:
    split = cls.setup_context is not torch.autograd.Function.setup_context

    def forward(ctx: Any, *args: Any) -> Any:
        call: _Application = args[-1]
        ctx.call, user_ctx = call, _Context(ctx)
        out = cls.forward(*call.args) if split else cls.forward(user_ctx, *call.args)
        call.many = isinstance(out, (list, tuple))
        outs = list(map(reduced, as_list(out)))
        if split:
            cls.setup_context(user_ctx, call.args, tuple(outs) if call.many else outs[0])
        call.outputs = [output._layout if isinstance(output, DTensor) else None for output in outs]
        return tuple(map(local_value, outs)) if call.many else local_value(outs[0])

    return staticmethod(forward)


def _backward_of(cls: Any) -> Any:
    once = getattr(cls.backward, "__code__", None) is _ONCE

    def back(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call: _Application = ctx.call
        cotangents = [
            grad if grad is None or layout is None else wrap(grad.detach() if once else grad, dual(layout))
            for grad, layout in zip(grads, call.outputs, strict=True)
        ]
        result = cls.backward(_Context(ctx), *cotangents)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(results) != len(call.args):
            msg = f"{cls.__name__}.backward returned {len(results)} gradients for {len(call.args)} arguments"
            raise RuntimeError(msg)
        return (
            *(
                local_gradient(f"{cls.__name__}.backward: gradient {index}", *pair)
                for index, pair in enumerate(zip(results, call.args, strict=True))
            ),
            None,
        )

    decorate: Callable[[Any], Any] = once_differentiable if once else _same
    return staticmethod(decorate(back))


def _same(function: Any) -> Any:
    return function

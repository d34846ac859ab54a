"""Gradients of MindSpore's own transforms, as DTensors.

``ms.grad``, ``ms.value_and_grad``, ``ops.GradOperation`` and ``ms.vjp`` share one function that runs forward and one
that runs backward, whose gradients are local tensors. These need no further reduction (core/dtensor/README.md). Here
they are wrapped as DTensors, so that functions of MindSpore that take gradients (clipping, overflow checks,
accumulation, optimizers written in Python) act on global tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from mindspore import Parameter, Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.errors import LayoutError, PlanError, UnsupportedOperatorError
from hyper_parallel.platform.contract.fully_sharded import unreduced_gradient

__all__ = [
    "AVERAGED",
    "check_current",
    "check_reduced",
    "hooks_on_dtensors",
    "local_gradients",
    "mark_replaced",
    "refusing_cell_hooks",
    "returning_layouts",
    "returning_reduced",
    "seeded_locally",
    "set_unreduced",
    "vjp_seeded_locally",
]

_LOCAL: ContextVar[bool] = ContextVar("local_gradients", default=False)
_REPLACED = "_hyper_parallel_replaced"
_UNREDUCED = "_hyper_parallel_unreduced"
AVERAGED = "_hyper_parallel_averaged"
"""Attribute of a parameter of ``replicate``: the object that averages its gradients."""


@contextmanager
def local_gradients() -> Iterator[None]:
    """Let transforms inside return local gradients, as MindSpore's own backward functions must."""
    token = _LOCAL.set(True)
    try:
        yield
    finally:
        _LOCAL.reset(token)


# -- parameters that are no longer those of their module ---------------------------------------------------------------


def mark_replaced(old: Any, new: Any) -> None:
    """Note that a module has parameter ``new`` in place of ``old``."""
    setattr(old, _REPLACED, True)
    if hasattr(new, _REPLACED):
        delattr(new, _REPLACED)


def check_current(caller: str, parameters: Any) -> None:
    """Refuse parameters that were replaced by DTensors: changes to them do not reach the module.

    Args:
        caller: name of the caller, for the message.
        parameters: a parameter, or several; values that are not parameters are skipped.

    Raises:
        PlanError: (a ValueError) one of them was replaced.
    """
    for parameter in parameters if isinstance(parameters, (list, tuple)) else (parameters,):
        if isinstance(parameter, Parameter) and hasattr(parameter, _REPLACED):
            msg = (
                f"{caller}: parameter {parameter.name} was replaced when its module was distributed or initialized, so "
                "the module has a different one; get the parameters, and build optimizers of them, after that"
            )
            raise PlanError(msg)


# -- gradients that are reduced over data axes -------------------------------------------------------------------------


def set_unreduced(parameter: Any, reason: str | None) -> None:
    """Record why the gradient of ``parameter`` is not reduced yet; None if it is reduced."""
    setattr(parameter, _UNREDUCED, reason)


def check_reduced(parameters: Any) -> None:
    """Refuse an optimizer step on parameters whose gradients are not reduced yet.

    Raises:
        PlanError: (a ValueError) the gradient of one of them is not reduced.
    """
    for parameter in parameters:
        reason = getattr(parameter, _UNREDUCED, None)
        if reason is not None:
            raise unreduced_gradient(parameter.name, reason)


def _averaged(weights: Any, grads: Any) -> Any:
    """Return the gradients of ``weights``; those of replicated parameters are averaged over their ranks."""
    parameters = list(weights) if isinstance(weights, (list, tuple)) else [weights]
    reducers = {id(reducer): reducer for each in parameters if (reducer := getattr(each, AVERAGED, None)) is not None}
    if not reducers:
        return grads
    values = list(grads) if isinstance(grads, (list, tuple)) else [grads]
    for reducer in reducers.values():
        averages = reducer.average({id(each): value for each, value in zip(parameters, values, strict=True)})
        values = [averages.get(id(each), value) for each, value in zip(parameters, values, strict=True)]
    return type(grads)(values) if isinstance(grads, (list, tuple)) else values[0]


# -- gradients ---------------------------------------------------------------------------------------------------------


def returning_layouts(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap MindSpore's backward to return the gradients of DTensors as DTensors in the dual layout."""

    @wraps(backward)
    def run(fn: Any, grad_op: Any, weights: Any, grad_position: Any, has_aux: bool, *run_args: Any) -> Any:
        check_current("the gradient", weights)
        grads = backward(fn, grad_op, weights, grad_position, has_aux, *run_args)
        if _LOCAL.get():
            return grads
        inputs = run_args[: len(run_args) - 1] if grad_op.sens_param else run_args
        by_position = getattr(grad_op, "get_by_position", False)
        if grad_op.get_all:
            sources: Any = tuple(value for value in inputs if isinstance(value, (Tensor, list, tuple)))
        elif by_position or not grad_op.get_by_list:
            sources = tuple(inputs[position] for position in grad_position)
        else:
            sources = None
        if not grad_op.get_by_list:
            return _laid_out(grads, sources)
        if sources is None:
            return _laid_out(_averaged(weights, grads), weights)
        return _laid_out(grads[0], sources), _laid_out(_averaged(weights, grads[1]), weights)

    return run


def _laid_out(grads: Any, values: Any) -> Any:
    """Return gradients of DTensors as DTensors in the dual layouts; a single gradient is not in a tuple."""
    if isinstance(grads, (list, tuple)):
        sources = values if isinstance(values, (list, tuple)) else (values,)
        if len(sources) == 1 and len(grads) > 1 and isinstance(sources[0], (list, tuple)):
            (sources,) = sources
        return type(grads)(_laid_out(grad, source) for grad, source in zip(grads, sources, strict=True))
    while isinstance(values, (list, tuple)):
        (values,) = values
    if not isinstance(values, DTensor) or isinstance(grads, DTensor) or grads is None:
        return grads
    return values._platform.wrap(grads, dual(values.layout))


# -- hooks -------------------------------------------------------------------------------------------------------------


def hooks_on_dtensors(register: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.register_hook`` to call the hooks of a DTensor with its gradient as a DTensor."""

    @wraps(register)
    def run(self: Any, hook: Callable[[Any], Any]) -> Any:
        return register(self, _on_dtensor(hook, self) if isinstance(self, DTensor) and callable(hook) else hook)

    return run


def _on_dtensor(hook: Callable[[Any], Any], tensor: DTensor) -> Callable[[Any], Any]:
    layout, notation = dual(tensor.layout), tensor.layout.notation(tensor.dtype)

    @wraps(hook)
    def run(grad: Any) -> Any:
        result = hook(tensor._platform.wrap(grad, layout))
        if result is None:
            return None
        if not isinstance(result, DTensor) or tuple(result.shape) != tuple(layout.shape or ()):
            msg = (
                f"the hook of {notation} returned {_described(result)}; return the gradient as a DTensor of shape "
                f"{list(layout.shape or ())}, or None"
            )
            raise LayoutError(msg)
        return result.redistribute_to(layout)._local

    return run


def _described(result: Any) -> str:
    kind = "a DTensor" if isinstance(result, DTensor) else f"a plain {type(result).__name__}"
    return f"{kind} of shape {list(result.shape)}" if isinstance(result, Tensor) else kind


def refusing_cell_hooks(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the operator that runs backward hooks of Cells to raise for DTensors: hooks would get shards."""

    @wraps(call)
    def run(self: Any, args: Any) -> Any:
        tensors = args if isinstance(args, tuple) else (args,)
        if self.hook_dict() and any(isinstance(tensor, DTensor) for tensor in tensors):
            msg = (
                f"backward hooks of {type(self.cell).__name__} would get this rank's shards of the gradients of "
                "DTensors; in a forward hook, call register_hook of the input or output, whose hooks get DTensors"
            )
            raise UnsupportedOperatorError(msg)
        return call(self, args)

    return run


# -- outputs and their seeds -------------------------------------------------------------------------------------------


def returning_reduced(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap MindSpore's forward to return reduced values; a pending sum and the reduced sum have the same gradient."""

    @wraps(forward)
    def run(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return _reduced(forward(fn, *args, **kwargs))

    return run


def _reduced(out: Any) -> Any:
    if type(out) in (list, tuple):
        return type(out)(_reduced(value) for value in out)
    if not isinstance(out, DTensor) or not out.layout.partials:
        return out
    if any(op != "sum" for _, op in out.layout.partials):
        msg = (
            f"the differentiated function returns {out.layout.notation(out.dtype)}, and MindSpore would seed its "
            "gradient on every rank as if that were the value; return out.reduce_partial(), or use "
            "hyper_parallel.value_and_grad"
        )
        raise UnsupportedOperatorError(msg)
    return out.reduce_partial()


def seeded_locally(run_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap MindSpore's forward: with ``sens_param``, the last argument, the seed, becomes this rank's shard."""

    @wraps(run_forward)
    def run(fn: Any, sens_param: bool, *args: Any, **kwargs: Any) -> Any:
        run_args, out = run_forward(fn, sens_param, *args, **kwargs)
        if sens_param and not _LOCAL.get():
            run_args = (*run_args[:-1], _seed(run_args[-1], out))
        return run_args, out

    return run


def vjp_seeded_locally(vjp: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ms.vjp``: the function that it returns passes on this rank's shards of the seeds."""

    @wraps(vjp)
    def run(fn: Any, *inputs: Any, weights: Any = None, has_aux: bool = False) -> Any:
        out, pull, *aux = vjp(fn, *inputs, weights=weights, has_aux=has_aux)

        def pulled(*seeds: Any) -> Any:
            outs = out if isinstance(out, tuple) else (out,)
            return pull(*(_seed(seed, value) for seed, value in zip(seeds, outs, strict=True)))

        return (out, pulled, *aux)

    return run


def _seed(seed: Any, out: Any) -> Any:
    """Return this rank's shard of ``seed`` for output ``out``; a plain seed is complete, and equal on all ranks."""
    if isinstance(out, (list, tuple)) and isinstance(seed, (list, tuple)):
        return type(seed)(_seed(part, value) for part, value in zip(seed, out, strict=True))
    if not isinstance(out, DTensor):
        if isinstance(seed, DTensor):
            return seed.full_tensor()
        return seed
    layout = dual(out.layout)
    if isinstance(seed, DTensor):
        return seed.redistribute_to(layout)._local
    if not isinstance(seed, Tensor) or tuple(seed.shape) != tuple(out.shape):
        msg = (
            f"the seed of the gradient has shape {list(getattr(seed, 'shape', ()))}, the output is "
            f"{out.layout.notation(out.dtype)}; pass a seed of the output's shape {list(out.shape)}, equal on all "
            "ranks, or a DTensor"
        )
        raise LayoutError(msg)
    whole = Layout.of(layout.mesh, ((),) * seed.ndim, (), tuple(seed.shape))
    return out._platform.wrap(seed, whole).redistribute_to(layout)._local

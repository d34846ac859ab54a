"""Guards of MindSpore's calls that would treat local tensors of DTensors as global tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from mindspore import Parameter, Tensor, mint, nn
from mindspore.experimental import optim

from hyper_parallel.core.dtensor.deferred_gradients import check_step_gradient
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore import intercept
from hyper_parallel.platform.mindspore.captured import reaches_dtensor
from hyper_parallel.platform.mindspore.gradients import check_current, check_reduced
from hyper_parallel.platform.mindspore.ops.loss_scale import UNCOMPILED
from hyper_parallel.platform.mindspore.versions import JitExecutor, PIJitCaptureContext, RecomputeCell
from hyper_parallel.transport.frontends.mindspore_comm.host import compiler_splits, on_accelerator

__all__ = [
    "BY_ELEMENT",
    "DIFFERENTIABLE",
    "refusing_copies",
    "refusing_parameters",
    "refusing_partial_gradients",
    "without_dtensors",
]

# Optimizers that update each element independently. Optimizers that use complete parameters or gradients (norms of
# layers, factored moments, centralized gradients) are not among them.
BY_ELEMENT = frozenset({
    nn.ASGD, nn.Adagrad, nn.Adam, nn.AdaMax, nn.AdamWeightDecay, nn.FTRL, nn.Momentum, nn.ProximalAdagrad, nn.RMSProp,
    nn.Rprop, nn.SGD, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip

_INSTEAD = {"LazyAdam": ("nn.Adam",), "AdamOffload": ("nn.Adam",)}

DIFFERENTIABLE = "use hyper_parallel.DFunction, whose rule declares how its results are placed"


def without_dtensors(what: str, instead: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``plain`` wrapped to raise if it would treat local tensors as global ones.

    Args:
        what: name of the function in messages.
        instead: the alternative that messages recommend.
        plain: the original.
    """

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        dtensors = (
            reaches_dtensor([arg for arg in args if isinstance(arg, (Tensor, nn.Cell, list, tuple, dict))])
            or reaches_dtensor(kwargs)
            or _has_dtensor_parameters(args[0])
        )
        served = UNCOMPILED.get(getattr(args[0], "fn", None)) if dtensors else None
        if served is not None:
            return served(*args[1:], **kwargs)
        # Recomputation differentiates DTensors itself; an optimizer's elementwise step is correct on shards.
        if dtensors and not (any(isinstance(arg, RecomputeCell) for arg in args) or _steps_by_element(args)):
            msg = (
                _optimizer_message(args)
                or f"{what}: it would see this rank's shards as if they were complete; {instead}"
            )
            raise UnsupportedOperatorError(msg)
        return plain(*args, **kwargs)

    return call


def _has_dtensor_parameters(caller: Any) -> bool:
    """True for a compiled Cell with a DTensor among its parameters, or a compiled function that reaches a DTensor."""
    cell = getattr(caller, "obj", None)
    if isinstance(cell, nn.Cell) and intercept.holds_dtensor(cell.get_parameters()):
        return True
    return isinstance(caller, (JitExecutor, PIJitCaptureContext)) and reaches_dtensor(caller.fn)


def _steps_by_element(args: tuple[Any, ...]) -> bool:
    """True for the compiled step of an optimizer of ``BY_ELEMENT``, with gradients in the same layouts."""
    optimizer: Any = getattr(args[0], "obj", None)
    if type(optimizer) not in BY_ELEMENT or any(getattr(optimizer, "grad_centralization_flags", ())):
        return False
    lists = (
        arg for arg in args[1:] if isinstance(arg, (list, tuple)) and all(isinstance(item, Tensor) for item in arg)
    )
    gradients = next(lists, args[1:])
    pairs = zip(optimizer.parameters, gradients, strict=False)
    return len(gradients) == len(optimizer.parameters) and all(
        _local_shape(parameter) == _local_shape(gradient)
        and not (isinstance(gradient, DTensor) and gradient.layout.partials)
        for parameter, gradient in pairs
    )


def _optimizer_message(args: tuple[Any, ...]) -> str:
    """Return why the compiled step of an optimizer is refused and what to use; empty if another reason applies.

    Args:
        args: arguments of the compiled function.
    """
    optimizer: Any = getattr(args[0], "obj", None)
    if not isinstance(optimizer, nn.Optimizer):
        return ""
    name = type(optimizer).__name__
    if type(optimizer) not in BY_ELEMENT:
        instead = " or ".join(_INSTEAD.get(type(optimizer).__name__, ("nn.Adam", "nn.AdamWeightDecay", "nn.SGD")))
        return (
            f"{name}: its step over DTensor parameters would see this rank's shards as if they were complete, and is "
            f"not known to update each element independently; use {instead}"
        )
    if any(getattr(optimizer, "grad_centralization_flags", ())):
        return (
            f"{name}: grad_centralization takes means of complete gradients, and its step would see this rank's shards "
            "as if they were complete; leave grad_centralization out"
        )
    return ""


class _Step(NamedTuple):
    """Stands in for a compiled step, in the form that :func:`_steps_by_element` reads."""

    obj: Any


def _local_shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.local_shape if isinstance(tensor, DTensor) else tensor.shape)


def refusing_partial_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's step to raise if a gradient is still partial."""

    @wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_current("the optimizer", list(self.parameters))
        check_reduced(self.parameters)
        _check_counts_steps(self)
        lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple))]
        for grads in lists:
            for parameter, grad in zip(self.parameters, grads, strict=False):
                if isinstance(grad, DTensor):
                    check_step_gradient(parameter.name, grad.layout, grad.dtype)
        if os.getenv("MS_JIT") != "0" or not _steps_by_element((_Step(self), *args)):
            return step(self, *args, **kwargs)
        if compiler_splits() and not any(isinstance(each, DTensor) for each in self.parameters):
            return step(self, *args, **kwargs)  # this compiler needs Ascend devices
        # Only a compiled step gets the local tensors, on which it is correct.
        del os.environ["MS_JIT"]
        try:
            return step(self, *args, **kwargs)
        finally:
            os.environ["MS_JIT"] = "0"

    return call


def _check_counts_steps(optimizer: Any) -> None:
    """Refuse an optimizer of ``mint.optim`` whose step count would stay zero.

    Such an optimizer counts steps by an in-place write to a plain tensor, which MindSpore's CPU build loses.

    Raises:
        UnsupportedOperatorError: ``optimizer`` is one of them, and a parameter is a DTensor.
    """
    counts = isinstance(optimizer, mint.optim.Adam) or (
        isinstance(optimizer, mint.optim.SGD) and any(group["momentum"] for group in optimizer.param_groups)
    )
    if counts and not on_accelerator() and any(isinstance(parameter, DTensor) for parameter in optimizer.parameters):
        name = type(optimizer).__name__
        msg = (
            f"mint.optim.{name} on CPU: MindSpore loses the write that counts its steps, so every step would be "
            f"computed as the first one; use mindspore.nn.{name} or mindspore.experimental.optim.{name}"
        )
        raise UnsupportedOperatorError(msg)


def refusing_copies(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a tensor's constructor to raise for a DTensor."""

    @wraps(init)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], DTensor) and not isinstance(self, DTensor):
            msg = "Tensor(x) of a DTensor: call x.full_tensor(), or x.to_local() for this rank's shard"
            raise UnsupportedOperatorError(msg)
        init(self, *args, **kwargs)

    return guarded


def refusing_parameters(new: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a parameter's constructor to raise for a DTensor parameter."""

    @wraps(new)
    def guarded(cls: type, default_input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(default_input, DTensor) and isinstance(default_input, Parameter):
            msg = "Parameter(p) of a DTensor parameter: call p.clone() for a new parameter with its own values"
            raise UnsupportedOperatorError(msg)
        return new(cls, default_input, *args, **kwargs)

    return guarded

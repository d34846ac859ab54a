"""Doors through which MindSpore would hand a DTensor's local values to plain operators, closed.

- Legacy primitives do not look inside lists: ``ops.stack`` and ``ops.addn`` would work on the local tensors.
- Some Python functions read nothing but a tensor's shape, or mix it with constants (``ops/python_api.py``).
- ``Tensor(x)`` would copy the local values into a plain tensor, and so would ``Parameter(p)`` of a parameter.
- Compiled functions, functions with a derivative of their own (``_Function``, Cells with a ``bprop``) and sparse
  conversions would work on the local tensors.

Each patch passes on at once when no DTensor is among the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspore import Parameter, Tensor, nn
from mindspore.common._grad_function import _Function
from mindspore.common.api import _CellGraphExecutor, _JitExecutor, _PyNativeExecutor
from mindspore.common.recompute import _RecomputeCell
from mindspore.experimental import optim
from mindspore.ops import primitive as primitives

from hyper_parallel.core.dtensor.deferred_gradients import refuse_partial_step
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore import intercept
from hyper_parallel.platform.mindspore.ops.python_api import REPLACED

__all__ = ["close"]


def close() -> None:
    """Close them; called once, by the platform's construction."""
    primitives._run_op = _asking(primitives._run_op)  # noqa: SLF001 - the one door of legacy primitives
    for name, plain in REPLACED.items():
        _replace(name, plain)
    Tensor.__init__ = _refusing(Tensor.__init__)
    Parameter.__new__ = _refusing_parameters(Parameter.__new__)
    for owner, name, what, instead in REFUSING:
        setattr(owner, name, _without_dtensors(vars(owner)[name], what, instead))
    plain = vars(_Function)["apply"].__func__
    for optimizer in (nn.Optimizer, optim.Optimizer):
        optimizer.__call__ = _stepping(optimizer.__call__)
    _Function.apply = classmethod(_without_dtensors(plain, "_Function.apply", DIFFERENTIABLE))


BY_ELEMENT = frozenset({
    nn.ASGD, nn.Adagrad, nn.Adam, nn.AdaMax, nn.AdamWeightDecay, nn.FTRL, nn.Momentum, nn.ProximalAdagrad, nn.RMSProp,
    nn.Rprop, nn.SGD, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip

DIFFERENTIABLE = "use hyper_parallel.DFunction, whose rule says how its results are placed"
# Where, what, how messages call it, and what to do instead.
REFUSING = (
    (_JitExecutor, "__call__", "a function compiled by ms.jit", "call it uncompiled, or on x.to_local() by local_map"),
    (_CellGraphExecutor, "__call__", "a Cell in graph mode", "use ms.set_context(mode=ms.PYNATIVE_MODE)"),
    (_PyNativeExecutor, "call_custom_bprop", "a Cell with a bprop of its own", DIFFERENTIABLE),
)


def _without_dtensors(plain: Callable[..., Any], what: str, instead: str) -> Callable[..., Any]:
    """``plain``, refused where it would be given local tensors for DTensors."""

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        meets = intercept.holds_dtensor(args) or (kwargs and intercept.holds_dtensor(kwargs.values())) or _owns(args[0])
        # Recomputation differentiates DTensors itself; an optimizer's step by elements is right on pieces.
        if meets and not (any(isinstance(one, _RecomputeCell) for one in args) or _steps_by_element(args)):
            msg = f"{what}: it would see this rank's pieces as if they were whole; {instead}"
            raise UnsupportedOperatorError(msg)
        return plain(*args, **kwargs)

    return call


def _owns(caller: Any) -> bool:
    """True for a compiled Cell with a DTensor among its parameters."""
    cell = getattr(caller, "obj", None)
    return isinstance(cell, nn.Cell) and intercept.holds_dtensor(cell.get_parameters())


def _steps_by_element(args: tuple[Any, ...]) -> bool:
    """True for the compiled step of an optimizer that updates each element by itself, with gradients laid out alike.

    Norms of layers, factored moments and centralised gradients look at whole parameters, so those are not among them.
    """
    optimizer: Any = getattr(args[0], "obj", None)
    if type(optimizer) not in BY_ELEMENT or any(getattr(optimizer, "grad_centralization_flags", ())):
        return False
    lists = (
        one for one in args[1:] if isinstance(one, (list, tuple)) and all(isinstance(item, Tensor) for item in one)
    )
    gradients = next(lists, args[1:])
    pairs = zip(optimizer.parameters, gradients, strict=False)
    return len(gradients) == len(optimizer.parameters) and all(
        tuple(held.local_shape if isinstance(held, DTensor) else held.shape)
        == tuple(one.local_shape if isinstance(one, DTensor) else one.shape)
        and not (isinstance(one, DTensor) and one.layout.partials)
        for held, one in pairs
    )


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step, refused while a gradient is pending."""

    @wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        lists = [one for one in (*args, *kwargs.values()) if isinstance(one, (list, tuple))]
        for grads in lists:
            for parameter, grad in zip(self.parameters, grads, strict=False):
                if isinstance(grad, DTensor):
                    refuse_partial_step(parameter.name, grad.layout, grad.dtype)
        return step(self, *args, **kwargs)

    return call


def _asking(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def run_op(primitive: Any, name: str, args: tuple[Any, ...]) -> Any:
        for one in args:
            if type(one) in (list, tuple) and intercept.holds_dtensor(one):
                return intercept.call(name, args, primitive=primitive)
        return run(primitive, name, args)

    return run_op


def _replace(name: str, plain: Callable[..., Any]) -> None:
    """Replace a function wherever MindSpore's modules hold it."""
    dispatching = _dispatching(name, plain)
    for path, module in list(sys.modules.items()):
        if path.startswith(("mindspore.ops", "mindspore.mint")):
            for held in [one for one, value in list(vars(module).items()) if value is plain]:
                setattr(module, held, dispatching)


def _dispatching(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if intercept.holds_dtensor(args) or intercept.holds_dtensor(kwargs.values()):
            return intercept.call(name, args, kwargs)
        return plain(*args, **kwargs)

    return call


def _refusing(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], DTensor) and not isinstance(self, DTensor):
            msg = "Tensor(x) of a DTensor: say x.full_tensor() for the whole, x.to_local() for this rank's piece"
            raise UnsupportedOperatorError(msg)
        init(self, *args, **kwargs)

    return guarded


def _refusing_parameters(new: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(new)
    def guarded(cls: type, default_input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(default_input, DTensor) and isinstance(default_input, Parameter):
            msg = "Parameter(p) of a DTensor parameter: say p.clone() for a new parameter with its own values"
            raise UnsupportedOperatorError(msg)
        return new(cls, default_input, *args, **kwargs)

    return guarded

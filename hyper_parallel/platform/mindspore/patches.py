"""Every patch of MindSpore, with its reason and the version that needs it.

``PATCHES`` is the list to check when MindSpore is upgraded: a test fails while a patch names another version than the
one that is installed. Where no DTensor is involved, each patch calls the original at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import getattr_static
from types import FrameType
from typing import Any, NamedTuple

from mindspore import Parameter, Tensor, nn
from mindspore.common._grad_function import _Function
from mindspore.common.api import _CellGraphExecutor, _JitExecutor, _pynative_executor, _PyNativeExecutor
from mindspore.common.recompute import _RecomputeCell, _RecomputeHandle
from mindspore.experimental import optim
from mindspore.graph._utils.pijit_context import PIJitCaptureContext
from mindspore.ops import primitive as primitives
from mindspore.ops.auto_generate import gen_ops_prim, pyboost_inner_prim
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func
from mindspore.ops.operations._inner_ops import CellBackwardHook
from mindspore.train import serialization

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.deferred_gradients import check_step_gradient
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.contract.memory import replayable_constructor
from hyper_parallel.platform.mindspore import intercept
from hyper_parallel.platform.mindspore.captured import reaches_dtensor
from hyper_parallel.platform.mindspore.gradients import (
    check_current,
    hooks_on_dtensors,
    local_gradients,
    refusing_cell_hooks,
    returning_layouts,
    returning_reduced,
    seeded_locally,
    vjp_seeded_locally,
)
from hyper_parallel.platform.mindspore.graph_mode import cells_uncompiled, gradients_uncompiled
from hyper_parallel.platform.mindspore.ops import numpy_api  # noqa: F401 - adds to what is replaced
from hyper_parallel.platform.mindspore.ops.loss_scale import UNCOMPILED
from hyper_parallel.platform.mindspore.ops.python_api import REPLACED
from hyper_parallel.platform.mindspore.saved_parameters import loading_shards, saving_whole
from hyper_parallel.platform.mindspore.softmax_gradient import (
    forget_gradients,
    primitive_without_size_one,
    without_size_one,
)

__all__ = ["PATCHES", "Patch", "install"]


@dataclass(frozen=True)
class Patch:
    """Attributes of MindSpore that are replaced.

    Attributes:
        places: owner (a module or class) and name of each attribute.
        replace: makes the replacement of the original.
        reason: why MindSpore's own does not serve.
        version: of MindSpore for which the reason was last checked.
    """

    places: tuple[tuple[Any, str], ...]
    replace: Callable[[Any], Any]
    reason: str
    version: str = "2.10"

    def install(self) -> None:
        """Replace the attributes; one original has one replacement, however many places have it."""
        replacements: dict[int, Any] = {}
        for owner, name in self.places:
            static = getattr_static(owner, name, None)
            bound = isinstance(static, classmethod)
            function = static.__func__ if bound else getattr(owner, name, None)
            if id(function) not in replacements:
                replaced = self.replace(function)
                replacements[id(function)] = classmethod(replaced) if bound else replaced
            setattr(owner, name, replacements[id(function)])


def install() -> None:
    """Install every patch; called once, by the platform's construction."""
    for patch in PATCHES:
        patch.install()
    if not _differentiating():
        forget_gradients()


# -- calls that skip ``__fallback__`` ----------------------------------------------------------------------------------


def _intercepted_lists(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def run_op(primitive: Any, name: str, args: tuple[Any, ...]) -> Any:
        for operand in args:
            if type(operand) in (list, tuple) and intercept.holds_dtensor(operand):
                return intercept.call(name, args, primitive=primitive)
        return run(primitive, name, args)

    return run_op


def _dispatched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if intercept.holds_dtensor(args) or intercept.holds_dtensor(kwargs.values()):
            return intercept.call(name, args, kwargs)
        return plain(*args, **kwargs)

    return call


_HOMES = ("mindspore.ops", "mindspore.mint", "mindspore.nn", "mindspore.numpy", "mindspore.train")


def _places_of(function: Callable[..., Any]) -> tuple[tuple[Any, str], ...]:
    """Where MindSpore's modules hold a function."""
    return tuple(
        (module, name)
        for path, module in list(sys.modules.items())
        if path == "mindspore" or path.startswith(_HOMES)
        for name, value in list(vars(module).items())
        if value is function
    )


# -- calls that would treat local tensors as global ones ---------------------------------------------------------------

# Optimizers that update each element by itself. Norms of layers, factored moments and centralized gradients look at
# whole parameters, so those are not among them.
BY_ELEMENT = frozenset({
    nn.ASGD, nn.Adagrad, nn.Adam, nn.AdaMax, nn.AdamWeightDecay, nn.FTRL, nn.Momentum, nn.ProximalAdagrad, nn.RMSProp,
    nn.Rprop, nn.SGD, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip

DIFFERENTIABLE = "use hyper_parallel.DFunction, whose rule says how its results are placed"


def _without_dtensors(what: str, instead: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``plain`` wrapped to raise if it would treat local tensors as global ones.

    Args:
        what: how messages name it.
        instead: what messages recommend.
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
        # Recomputation differentiates DTensors itself; an optimizer's step by elements is right on shards.
        if dtensors and not (any(isinstance(arg, _RecomputeCell) for arg in args) or _steps_by_element(args)):
            msg = f"{what}: it would see this rank's shards as if they were whole; {instead}"
            raise UnsupportedOperatorError(msg)
        return plain(*args, **kwargs)

    return call


def _has_dtensor_parameters(caller: Any) -> bool:
    """True for a compiled Cell with a DTensor among its parameters, or a compiled function that reaches a DTensor."""
    cell = getattr(caller, "obj", None)
    if isinstance(cell, nn.Cell) and intercept.holds_dtensor(cell.get_parameters()):
        return True
    return isinstance(caller, (_JitExecutor, PIJitCaptureContext)) and reaches_dtensor(caller.fn)


def _steps_by_element(args: tuple[Any, ...]) -> bool:
    """True for the compiled step of an optimizer of ``BY_ELEMENT``, with gradients that are laid out alike."""
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


class _Step(NamedTuple):
    """A step that is not compiled, as :func:`_steps_by_element` reads it."""

    obj: Any


def _local_shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.local_shape if isinstance(tensor, DTensor) else tensor.shape)


def _refusing_partial_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's step to raise if a gradient is still partial."""

    @wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_current("the optimizer", list(self.parameters))
        lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple))]
        for grads in lists:
            for parameter, grad in zip(self.parameters, grads, strict=False):
                if isinstance(grad, DTensor):
                    check_step_gradient(parameter.name, grad.layout, grad.dtype)
        if os.getenv("MS_JIT") != "0" or not _steps_by_element((_Step(self), *args)):
            return step(self, *args, **kwargs)
        # Only a compiled step sees the local tensors, on which it is right.
        del os.environ["MS_JIT"]
        try:
            return step(self, *args, **kwargs)
        finally:
            os.environ["MS_JIT"] = "0"

    return call


def _refusing_copies(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], DTensor) and not isinstance(self, DTensor):
            msg = "Tensor(x) of a DTensor: say x.full_tensor() for the whole, x.to_local() for this rank's shard"
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


# -- differentiations that fail ----------------------------------------------------------------------------------------

_FORWARD, _BACKWARD = "_pynative_func_grad_forward", "_pynative_func_grad_backward"


def _recovering(differentiated: Callable[..., Any]) -> Callable[..., Any]:
    """Clear MindSpore's record after an exception, but not inside another differentiation, which still needs it."""

    @wraps(differentiated)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return differentiated(*args, **kwargs)
        except BaseException:
            if not _differentiating():
                _pynative_executor.clear_res()
            raise

    return run


def _differentiating() -> bool:
    """True inside a differentiation; MindSpore's own flag stays set after one that failed."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python has no public way to the frames
    while frame is not None:
        if frame.f_code.co_name == _FORWARD:
            return True
        frame = frame.f_back
    return False


# -- recomputation -----------------------------------------------------------------------------------------------------

_STATES = "_hyper_parallel_states"


def _remembering(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward to push the random state onto a stack."""

    @wraps(plain)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault(_STATES, []).append(random.get_state())
        return plain(self, *args, **kwargs)

    return construct


def _replaying(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The backward, which runs the forward again on the arguments that it takes from the stack."""

    @wraps(plain)
    def bprop(self: Any, *args: Any) -> Any:
        with random.replay(self.__dict__[_STATES].pop()), local_gradients():
            return plain(self, *args)

    return bprop


# -- the list ----------------------------------------------------------------------------------------------------------

_UNCOMPILED = "call it uncompiled, or on x.to_local() by local_map"
_CALLED = "call it, which runs it uncompiled"
_SEES_LOCAL_TENSORS = "it sees the local tensors of DTensors as if they were whole"
_LOCAL_GRADIENTS = "gradients and seeds are local tensors, which clipping and overflow checks would take for the whole"
_SPOILS_GRADIENTS = "its gradient along an axis of size 1 makes the gradients of later softmaxes wrong"
_SAMPLES_ANEW = "running again restores MindSpore's generator, not the one that DTensors are sampled from"

PATCHES: tuple[Patch, ...] = (
    Patch(
        ((Tensor, "__fallback__"),),
        lambda _: intercept.fallback,
        "MindSpore looks for the handler on the first tensor, which may be a plain one or a Parameter",
    ),
    Patch(
        ((primitives, "_run_op"),),
        _intercepted_lists,
        "legacy primitives do not look for DTensors in lists: ops.stack and ops.addn would use the local tensors",
    ),
    *(
        Patch(
            _places_of(function),
            partial(_dispatched, name),
            "it reads only the shape of a tensor, or mixes it with constants of that shape",
        )
        for name, function in REPLACED.items()
    ),
    Patch(((Tensor, "__init__"),), _refusing_copies, "Tensor(x) copies the local values of a DTensor"),
    Patch(((Parameter, "__new__"),), _refusing_parameters, "Parameter(p) copies the local values of a DTensor"),
    Patch(
        ((_JitExecutor, "__call__"), (_JitExecutor, "compile")),
        partial(_without_dtensors, "a function compiled by ms.jit", _UNCOMPILED),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((PIJitCaptureContext, "__enter__"),),
        partial(_without_dtensors, "a function compiled by ms.jit", _UNCOMPILED),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((_CellGraphExecutor, "compile"), (_CellGraphExecutor, "__call__")),
        partial(_without_dtensors, "a Cell compiled to a graph", f"{_CALLED}, or export plain tensors"),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(((nn.Cell, "compile_and_run"),), cells_uncompiled, _SEES_LOCAL_TENSORS),
    Patch(((base.GradOperation, "__call__"), (base._Grad, "__call__")), gradients_uncompiled, _SEES_LOCAL_TENSORS),  # noqa: SLF001 - ms.grad and value_and_grad are made of it
    Patch(
        ((_PyNativeExecutor, "call_custom_bprop"),),
        partial(_without_dtensors, "a Cell with a bprop of its own", DIFFERENTIABLE),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((_Function, "apply"),),
        partial(_without_dtensors, "_Function.apply", DIFFERENTIABLE),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((nn.Optimizer, "__call__"), (optim.Optimizer, "__call__")),
        _refusing_partial_gradients,
        "optimizers step on local gradients, which are wrong while their reduction is pending",
    ),
    *(
        Patch(
            ((base, name), (grad_func, name)),
            _recovering,
            "an exception in a function that is differentiated leaves a record after which x[0] of any tensor fails",
        )
        for name in (_FORWARD, _BACKWARD)
    ),
    Patch(((base, _FORWARD), (grad_func, _FORWARD)), returning_reduced, _LOCAL_GRADIENTS),
    Patch(((base, _BACKWARD), (grad_func, _BACKWARD)), returning_layouts, _LOCAL_GRADIENTS),
    Patch(((Tensor, "register_hook"),), hooks_on_dtensors, _LOCAL_GRADIENTS),
    Patch(((CellBackwardHook, "__call__"),), refusing_cell_hooks, _LOCAL_GRADIENTS),
    Patch(((base, "_pynative_forward_run"),), seeded_locally, _LOCAL_GRADIENTS),
    Patch(_places_of(grad_func.vjp), vjp_seeded_locally, _LOCAL_GRADIENTS),
    Patch(((gen_ops_prim, "pyboost_softmax"),), primitive_without_size_one, _SPOILS_GRADIENTS),
    Patch(((type(pyboost_inner_prim.softmax_impl), "__call__"),), without_size_one, _SPOILS_GRADIENTS),
    Patch(
        _places_of(serialization.save_checkpoint),
        saving_whole,
        "it copies parameters by Tensor(p), and every rank would write the same file",
    ),
    Patch(
        _places_of(serialization._update_param),  # noqa: SLF001 - what loads one parameter has no public name
        loading_shards,
        "it hands the whole value to set_data, which takes a shard of a DTensor",
    ),
    Patch(
        ((_RecomputeHandle, "__init__"),),
        lambda init: replayable_constructor(init, random.get_state, random.replay),
        _SAMPLES_ANEW,
    ),
    Patch(((_RecomputeCell, "construct"),), _remembering, _SAMPLES_ANEW),
    Patch(((_RecomputeCell, "bprop"),), _replaying, _SAMPLES_ANEW),
)

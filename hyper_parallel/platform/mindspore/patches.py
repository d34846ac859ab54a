"""Every patch of MindSpore, with its reason and the versions that need it.

``PATCHES`` is the list to check when MindSpore is upgraded: a test fails on a version for which the reasons have not
been checked. Where no DTensor is involved, each patch calls the original at once. If a version
lacks the attribute, nothing is replaced, and a warning names the feature that is lost.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import getattr_static
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim
from mindspore.ops import functional_overload, primitive as primitives, tensor_method
from mindspore.ops.auto_generate import gen_ops_prim, pyboost_inner_prim
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func
from mindspore.train import serialization

from hyper_parallel._versions import Missing
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.dispatch import CACHE_MISS
from hyper_parallel.platform.mindspore import intercept
from hyper_parallel.platform.mindspore.gradients import (
    hooks_on_dtensors,
    refusing_cell_hooks,
    returning_layouts,
    returning_reduced,
    seeded_locally,
    vjp_seeded_locally,
)
from hyper_parallel.platform.mindspore.graph_mode import cells_uncompiled, gradients_uncompiled
from hyper_parallel.platform.mindspore.mixed_precision import noting_precision, noting_reset
from hyper_parallel.platform.mindspore.ops import numpy_api  # noqa: F401 - adds to what is replaced
from hyper_parallel.platform.mindspore.ops.attention import with_states
from hyper_parallel.platform.mindspore.ops.loss_scale import overflow_by_values, scaled_step
from hyper_parallel.platform.mindspore.ops.python_api import REPLACED
from hyper_parallel.platform.mindspore.recomputed import remembering, replaying, replaying_later, with_shards
from hyper_parallel.platform.mindspore.saved_parameters import loading_shards, saving_whole
from hyper_parallel.platform.mindspore.shard_guards import (
    DIFFERENTIABLE,
    refusing_copies,
    refusing_parameters,
    refusing_partial_gradients,
    without_dtensors,
)
from hyper_parallel.platform.mindspore.softmax_gradient import (
    forget_gradients,
    primitive_without_size_one,
    without_size_one,
)
from hyper_parallel.platform.mindspore.versions import (
    CellBackwardHook,
    CellGraphExecutor,
    Function,
    Grad,
    JitExecutor,
    PIJitCaptureContext,
    PyNativeExecutor,
    RecomputeCell,
    RecomputeHandle,
    RecurrentLayer,
    pynative_executor,
    update_param,
)
from hyper_parallel.platform.mindspore.versions.older import (
    accepting_always_call,
    accepting_prepend,
    calling_hooks_after_failures,
    filling_by_where,
    offer_functions,
)
from hyper_parallel.platform.tested import TESTED

__all__ = ["CALLS", "PATCHES", "Patch", "differentiating", "install", "places_of"]


@dataclass(frozen=True)
class Patch:
    """Attributes of MindSpore that are replaced.

    Attributes:
        places: owner (a module or class) and name of each attribute.
        replace: makes the replacement of the original.
        reason: the reason why MindSpore's original does not work.
        versions: versions of MindSpore for which the reason was checked.
        adds: MindSpore reads the attribute but does not define it.
    """

    places: tuple[tuple[Any, str], ...]
    replace: Callable[[Any], Any]
    reason: str
    versions: tuple[str, ...] = TESTED["mindspore"]
    adds: bool = False

    def install(self) -> None:
        """Replace the attributes; an original that several places have gets one replacement."""
        replacements: dict[int, Any] = {}
        for owner, name in self.places:
            if isinstance(owner, Missing) or not (self.adds or hasattr(owner, name)):
                self._warn_of_missing(owner, name)
                continue
            static = getattr_static(owner, name, None)
            bound = isinstance(static, classmethod)
            function = static.__func__ if bound else getattr(owner, name, None)
            if id(function) not in replacements:
                replaced = self.replace(function)
                replacements[id(function)] = classmethod(replaced) if bound else replaced
            setattr(owner, name, replacements[id(function)])

    def _warn_of_missing(self, owner: Any, name: str) -> None:
        place = f"MindSpore {mindspore.__version__} has no {getattr(owner, '__name__', owner)}.{name}"
        text = owner.message if isinstance(owner, Missing) else place
        warnings.warn(f"{text}; it would be replaced, because {self.reason}", stacklevel=2)


def install() -> None:
    """Install every patch; called once, by the platform's construction."""
    offer_functions()
    for patch in PATCHES:
        patch.install()
    if not differentiating():
        forget_gradients()


# -- calls that skip ``__fallback__`` ----------------------------------------------------------------------------------


_PLAIN = frozenset({Tensor, int, float, bool, str, type(None)})  # operands that need no handler


def _intercepted_at_once(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def run_op(primitive: Any, name: str, args: tuple[Any, ...]) -> Any:
        for operand in args:
            if type(operand) in _PLAIN:
                continue
            if isinstance(operand, DTensor):
                result = intercept.at_once(name, args, primitive)
                if result is not CACHE_MISS:
                    return result
                break
            if type(operand) in (list, tuple) and name != "typeof" and intercept.holds_dtensor(operand):
                return intercept.call(name, args, primitive=primitive)
        return run(primitive, name, args)

    return run_op


def _function_at_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that MindSpore's Python layer calls with an operator and its operands."""

    @wraps(call)
    def run(primitive: Any, operands: list[Any]) -> Any:
        first = operands[0]
        if type(first) is not Tensor and intercept.holds_dtensor((first,)):
            result = intercept.at_once(primitive.name, operands)
            if result is not CACHE_MISS:
                return result
        return call(primitive, operands)

    return run


def _operator_at_once(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator that MindSpore's Python layer calls with its operands."""

    @wraps(call)
    def run(operator: Any, *operands: Any) -> Any:
        if operands and type(operands[0]) is not Tensor and intercept.holds_dtensor(operands[:1]):
            result = intercept.at_once(name, operands)
            if result is not CACHE_MISS:
                return result
        return call(operator, *operands)

    return run


def _dispatched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if intercept.holds_dtensor(args) or intercept.holds_dtensor(kwargs.values()):
            return intercept.call(name, args, kwargs)
        return plain(*args, **kwargs)

    return call


_HOMES = ("mindspore.ops", "mindspore.mint", "mindspore.nn", "mindspore.numpy", "mindspore.train")


def places_of(function: Callable[..., Any]) -> tuple[tuple[Any, str], ...]:
    """Return the modules of MindSpore that have a function, with its name in each."""
    return tuple(
        (module, name)
        for path, module in list(sys.modules.items())
        if path == "mindspore" or path.startswith(_HOMES)
        for name, value in list(vars(module).items())
        if value is function
    )


# -- differentiations that fail ----------------------------------------------------------------------------------------

_FORWARD, _BACKWARD = "_pynative_func_grad_forward", "_pynative_func_grad_backward"


def _recovering(differentiated: Callable[..., Any]) -> Callable[..., Any]:
    """Clear MindSpore's tape after an exception, but not inside another differentiation, which still needs it."""

    @wraps(differentiated)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return differentiated(*args, **kwargs)
        except BaseException:
            if not differentiating():
                pynative_executor.clear_res()
            raise

    return run


def differentiating() -> bool:
    """True inside a differentiation; MindSpore's own flag stays set after one that failed."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == _FORWARD:
            return True
        frame = frame.f_back
    return False


# -- the list ----------------------------------------------------------------------------------------------------------

_UNCOMPILED = "call it uncompiled, or on x.to_local() by local_map"
_CALLED = "call it, which runs it uncompiled"
_SEES_LOCAL_TENSORS = "it sees the local tensors of DTensors as if they were complete"
_LOCAL_GRADIENTS = "gradients and seeds are local tensors, which clipping and overflow checks would treat as complete"
_SPOILS_GRADIENTS = "its gradient along an axis of size 1 makes the gradients of later softmaxes wrong"
_CASTS_LATE = "operands are cast for mixed precision after DTensors are dispatched, and the setting cannot be read"
_ROUNDS = "Tensor.masked_fill rounds float64 and its gradients to float32, and has no kernel for integers"
_SEARCHES = "MindSpore's search for the handler of a DTensor takes as long as a cheap operator"
_SAMPLES_ANEW = "recomputation restores MindSpore's generator, but not the one that DTensors are sampled from"

_LEGACY = (primitives, "_run_op")
_FUNCTIONS = tuple((gen_ops_prim, name) for name in vars(gen_ops_prim) if name.startswith("pyboost_"))
_OVERLOADED = tuple((functional_overload, name) for name in vars(functional_overload) if name.endswith("_instance"))
CALLS = (_LEGACY, *_FUNCTIONS, *_OVERLOADED)
"""Functions that MindSpore's Python layer calls with an operator and its operands: owner and name of each."""

PATCHES: tuple[Patch, ...] = (
    Patch(((PyNativeExecutor, "set_mixed_precision_type"),), noting_precision, _CASTS_LATE),
    Patch(((PyNativeExecutor, "clear_res"),), noting_reset, _CASTS_LATE),
    Patch(
        ((Tensor, "__fallback__"),),
        lambda _: intercept.fallback,
        "MindSpore looks for the handler on the first tensor, which may be a plain one or a Parameter",
        adds=True,
    ),
    Patch(
        (_LEGACY,),
        _intercepted_at_once,
        "legacy primitives do not look for DTensors in lists: ops.stack and ops.addn would use the local tensors; and "
        + _SEARCHES,
    ),
    *(
        Patch(
            places_of(function),
            partial(_dispatched, name),
            "it reads only the shape of a tensor, or mixes it with constants of that shape",
        )
        for name, function in REPLACED.items()
    ),
    Patch(((Tensor, "__init__"),), refusing_copies, "Tensor(x) copies the local values of a DTensor"),
    Patch(((Parameter, "__new__"),), refusing_parameters, "Parameter(p) copies the local values of a DTensor"),
    Patch(
        ((JitExecutor, "__call__"), (JitExecutor, "compile")),
        partial(without_dtensors, "a function compiled by ms.jit", _UNCOMPILED),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((PIJitCaptureContext, "__enter__"),),
        partial(without_dtensors, "a function compiled by ms.jit", _UNCOMPILED),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((CellGraphExecutor, "compile"), (CellGraphExecutor, "__call__")),
        partial(without_dtensors, "a Cell compiled to a graph", f"{_CALLED}, or export plain tensors"),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(((nn.Cell, "compile_and_run"),), cells_uncompiled, _SEES_LOCAL_TENSORS),
    *(
        Patch(((nn.Cell, name),), partial(accepting_prepend, hooks), "it has no argument prepend", versions=("2.8",))
        for name, hooks in (
            ("register_forward_hook", "_forward_hook"),
            ("register_forward_pre_hook", "_forward_pre_hook"),
        )
        if "prepend" not in inspect.signature(getattr(nn.Cell, name)).parameters
    ),
    *(
        Patch(((nn.Cell, name),), replace, "a hook does not run if the forward raises", versions=("2.8", "2.9"))
        for name, replace in (
            ("register_forward_hook", accepting_always_call),
            ("__call__", calling_hooks_after_failures),
        )
        if "always_call" not in inspect.signature(nn.Cell.register_forward_hook).parameters
    ),
    *(
        [Patch(((Tensor, "masked_fill"),), partial(filling_by_where, DTensor), _ROUNDS, versions=("2.8",))]
        if "astype" not in tensor_method.tensor_masked_fill.__code__.co_names
        else []
    ),
    Patch(((base.GradOperation, "__call__"), (Grad, "__call__")), gradients_uncompiled, _SEES_LOCAL_TENSORS),
    Patch(
        ((PyNativeExecutor, "call_custom_bprop"),),
        partial(without_dtensors, "a Cell with a bprop of its own", DIFFERENTIABLE),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((Function, "apply"),),
        partial(without_dtensors, "_Function.apply", DIFFERENTIABLE),
        _SEES_LOCAL_TENSORS,
    ),
    Patch(
        ((nn.Optimizer, "__call__"), (optim.Optimizer, "__call__")),
        refusing_partial_gradients,
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
    *(
        [Patch(places_of(grad_func.vjp), vjp_seeded_locally, _LOCAL_GRADIENTS)]
        if _FORWARD in grad_func.vjp.__code__.co_names
        else []  # this vjp calls GradOperation with the seed
    ),
    Patch(((gen_ops_prim, "pyboost_softmax"),), primitive_without_size_one, _SPOILS_GRADIENTS),
    Patch(((type(pyboost_inner_prim.softmax_impl), "__call__"),), without_size_one, _SPOILS_GRADIENTS),
    Patch(_FUNCTIONS, _function_at_once, _SEARCHES),
    *(
        Patch(((type(operator), "__call__"),), partial(_operator_at_once, name), _SEARCHES)
        for name, operator in (
            ("Concat", pyboost_inner_prim.concat_impl),
            ("Softmax", pyboost_inner_prim.softmax_impl),
            ("StackExt", pyboost_inner_prim.stack_ext_impl),
        )
    ),
    Patch(((nn.TrainOneStepWithLossScaleCell, "construct"),), scaled_step, "the loss scale is a plain tensor"),
    Patch(
        ((nn.TrainOneStepWithLossScaleCell, "get_overflow_status"),),
        overflow_by_values,
        "it reads status registers of NPUs, which CPUs do not have",
    ),
    Patch(((RecurrentLayer, "construct"),), with_states, "the initial states that it makes are plain tensors"),
    Patch(
        places_of(serialization.save_checkpoint),
        saving_whole,
        "it copies parameters by Tensor(p), and every rank would write the same file",
    ),
    Patch(
        places_of(update_param),
        loading_shards,
        "it passes the complete value to set_data, which for a DTensor takes the shard",
    ),
    Patch(
        ((RecomputeHandle, "__init__"),),
        replaying_later,
        _SAMPLES_ANEW,
    ),
    Patch(
        ((RecomputeCell, "__call__"),),
        with_shards,
        "the hooks that gather parameters are not called for the second run",
    ),
    Patch(((RecomputeCell, "construct"),), remembering, _SAMPLES_ANEW),
    Patch(((RecomputeCell, "bprop"),), replaying, _SAMPLES_ANEW),
)

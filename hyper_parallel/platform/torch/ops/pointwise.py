"""PyTorch's spellings of the pointwise family: functions, methods, Python's operators, casts and constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.shard.entry import binder
from hyper_parallel.core.shard.rules import pointwise
from hyper_parallel.platform.torch.ops.registry import (
    aten,
    decomposition,
    functions_named,
    kernel,
    nn,
    overloads_named,
    signature_of,
    spelling,
)

# -- functions of elements ---------------------------------------------------------------------------------------------

ELEMENTWISE = [
    *f"{pointwise.STEPWISE} {pointwise.NONLINEAR} neg deg2rad rad2deg frexp".split(),
    *f"{pointwise.BINARY} add sub rsub mul div lerp addcmul addcdiv clamp masked_fill".split(),
]


def _option_in_place(op: str) -> None:
    """Dispatch ``F.<op>(x, ..., inplace=False)``, a Python function of PyTorch, as ``<op>`` or ``<op>_`` in C++."""
    function = getattr(F, op, None)
    if not inspect.isfunction(function) or function.__name__ != op:
        return
    options = list(inspect.signature(function).parameters.values())[1:]
    if "inplace" not in [option.name for option in options]:
        return
    plain, writing = (
        next(getattr(home, name) for home in (torch, nn) if hasattr(home, name)) for name in (op, f"{op}_")
    )

    names = {"x", *(option.name for option in options)} - {"inplace"}
    one_operator = names == set(binder(signature_of(op)).names)

    @decomposition(
        function,
        signature=", ".join(["x", *(f"{option.name}={option.default!r}" for option in options)]),
        unless=(op, lambda arguments: arguments["inplace"] is not False) if one_operator else None,
    )
    def run(_ops: Any, x: Any, inplace: bool, **rest: Any) -> Any:
        return (writing if inplace else plain)(x, *rest.values())


for _op in ELEMENTWISE:
    _option_in_place(_op)
    if _op != "polygamma":
        spelling(_op, *functions_named(_op), *overloads_named(_op, f"special_{_op}", f"{_op}_"))

spelling(
    "polygamma", torch.polygamma, torch.special.polygamma, *overloads_named("polygamma", "special_polygamma"),
    signature="n, x",
)  # fmt: skip
spelling("polygamma", Tensor.polygamma, Tensor.polygamma_, *overloads_named("polygamma_"))


@kernel("polygamma")
def _polygamma(x: Tensor, n: int) -> Tensor:
    return torch.polygamma(n, x)


@kernel("gelu")
def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


spelling("glu", F.glu)

# Aliases of the same functions.
spelling("acos", *functions_named("arccos"))
spelling("acosh", *functions_named("arccosh"))
spelling("asin", *functions_named("arcsin"))
spelling("asinh", *functions_named("arcsinh"))
spelling("atan", *functions_named("arctan"))
spelling("atan2", *functions_named("arctan2"))
spelling("atanh", *functions_named("arctanh"))
spelling("abs", *functions_named("absolute"))
spelling("bitwise_not", Tensor.__invert__)
spelling("clamp", *functions_named("clip"))
spelling("digamma", *functions_named("psi"))
spelling("div", *functions_named("divide"), *functions_named("true_divide"))
spelling("ge", *functions_named("greater_equal"))
spelling("gt", *functions_named("greater"))
spelling("igamma", *functions_named("gammainc"))
spelling("igammac", *functions_named("gammaincc"))
spelling("le", *functions_named("less_equal"))
spelling("lgamma", *functions_named("gammaln"))
spelling("lt", *functions_named("less"))
spelling("mul", *functions_named("multiply"))
spelling("mvlgamma", *functions_named("multigammaln"))
spelling("ne", *functions_named("not_equal"))
spelling("neg", *functions_named("negative"))
spelling("sigmoid", *functions_named("expit"))
spelling("sub", *functions_named("subtract"))
spelling("trunc", *functions_named("fix"))


# -- Python's operators ------------------------------------------------------------------------------------------------


def _python_operator(op: str, name: str, *, commutes: bool = False) -> None:
    """``x + y``, ``y + x`` and ``x += y``, each where tensors have it."""
    forward, reflected, writing = (getattr(Tensor, f"__{kind}{name}__", None) for kind in ("", "r", "i"))
    if forward is not None:
        spelling(op, forward)
    if reflected is not None:
        _, _, *rest = signature_of(op).split(", ")
        spelling(op, reflected, signature=None if commutes else ", ".join(["y", "x", *rest]))
    if writing is not None:
        spelling(op, writing, in_place=True)


for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    _python_operator(_op, _op)
_python_operator("add", "add", commutes=True)
_python_operator("sub", "sub")
_python_operator("mul", "mul", commutes=True)
_python_operator("div", "truediv")
spelling("div", Tensor.__div__)
_python_operator("floor_divide", "floordiv")
_python_operator("remainder", "mod")
_python_operator("pow", "pow")
_python_operator("bitwise_and", "and", commutes=True)
_python_operator("bitwise_or", "or", commutes=True)
_python_operator("bitwise_xor", "xor", commutes=True)
_python_operator("bitwise_left_shift", "lshift")
_python_operator("bitwise_right_shift", "rshift")


# -- parts of complex numbers ------------------------------------------------------------------------------------------

spelling("conj", "conj", aten._conj.default)
spelling("conj_physical", "conj_physical", aten._conj_physical.default, aten.conj_physical.default, copies_back=True)
spelling("resolve_conj")
spelling("resolve_neg")
spelling("real", torch.real, Tensor.real.__get__)  # type: ignore[attr-defined]
spelling("imag", torch.imag, Tensor.imag.__get__)  # type: ignore[attr-defined]


@kernel("imag")
def _imag(x: Tensor) -> Tensor:
    return x.imag


# -- choices, copies and constants -------------------------------------------------------------------------------------

kernel("where")(torch.where)
spelling("where", Tensor.where, signature="x, condition, y")
spelling("where", *overloads_named("where"))

spelling("clone", "clone", *overloads_named("clone"))
spelling("clone", aten.alias_copy.default, signature="x, *, memory_format=None")
spelling("contiguous", Tensor.contiguous, *overloads_named("contiguous"))
spelling("detach", torch.detach, *overloads_named("detach"))
spelling("copy", Tensor.copy_, *overloads_named("copy_"))
spelling("zero", Tensor.zero_, torch.zero_, *overloads_named("zero_"))
spelling("fill", Tensor.fill_, torch.fill_, *overloads_named("fill_"))
for _op in ("zeros_like", "ones_like", "empty_like", "full_like", "linspace", "logspace"):
    spelling(_op, getattr(torch, _op), *overloads_named(_op))
for _op in ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"):
    spelling(_op, getattr(Tensor, _op), *overloads_named(_op))
spelling("dropout_backward", aten.native_dropout_backward.default)


@decomposition(torch.fill, *overloads_named("fill"), signature="x, value")
def _filled(_ops: Any, x: Any, value: Any) -> Any:
    """Return a copy of ``x`` that is filled with ``value``."""
    return x.clone().fill_(value)


@kernel("clone")
def _clone(x: Tensor, memory_format: Any) -> Tensor:
    del memory_format  # local tensors are dense
    return x.clone()


@kernel("contiguous")
def _contiguous(x: Tensor, memory_format: Any) -> Tensor:
    del memory_format  # local tensors are dense
    return x.contiguous()


@kernel("detach")
def _detach(x: Tensor) -> Tensor:
    return x.detach()


@kernel("copy")
def _copy(x: Tensor, y: Tensor, non_blocking: bool) -> Tensor:
    return x.copy_(y, non_blocking)


@kernel("zero")
def _zero(x: Tensor) -> Tensor:
    return x.zero_()


@kernel("fill")
def _fill(x: Tensor, value: Any) -> Tensor:
    return x.fill_(value)


@kernel("new_empty_strided")
def _new_empty_strided(x: Tensor, size: Any, stride: Any, **options: Any) -> Tensor:
    return x.new_empty_strided(size, stride, **options)


# -- casts -------------------------------------------------------------------------------------------------------------

spelling(
    "cast",
    aten._to_copy.default,
    signature="x, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None",
)


@kernel("cast")
def _cast(x: Tensor, dtype: Any, device: Any, non_blocking: bool, copy: bool, memory_format: Any) -> Tensor:
    del memory_format  # local tensors are dense
    return x.to(device=device, dtype=dtype, non_blocking=non_blocking, copy=copy)


@decomposition(
    Tensor.to, signature="x, *args, dtype=None, device=None, non_blocking=False, copy=False, memory_format=None"
)
def _to(ops: Any, x: Any, args: tuple[Any, ...], **options: Any) -> Any:
    """``to(dtype)``, ``to(device, dtype)``, ``to(other)``, each with ``non_blocking, copy`` after it."""
    dtype, device = options["dtype"], options["device"]
    flags = [arg for arg in args if isinstance(arg, bool)]
    for arg in args:
        if isinstance(arg, Tensor):
            dtype, device = arg.dtype, arg.device
        elif isinstance(arg, torch.dtype):
            dtype = arg
        elif arg is not None and not isinstance(arg, bool):
            device = arg
    device = None if device is None else torch.device(device)
    copy = flags[1] if len(flags) > 1 else options["copy"]
    if not copy and dtype in (None, x.dtype) and (device is None or _is_on(device, x.device)):
        return x
    return ops.cast(x, dtype=dtype, device=device, non_blocking=(flags or [options["non_blocking"]])[0], copy=copy)


def _is_on(wanted: torch.device, actual: torch.device) -> bool:
    return wanted.type == actual.type and wanted.index in (None, actual.index)


@decomposition(Tensor.type_as, signature="x, y")
def _type_as(ops: Any, x: Any, y: Any) -> Any:
    return _cast_to(ops, x, y.dtype)


def _cast_to(ops: Any, x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else ops.cast(x, dtype=dtype)


def _casting(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda ops, x, memory_format: _cast_to(ops, x, dtype)  # noqa: ARG005 - locals are dense


for _method, _dtype in (
    (Tensor.float, torch.float32), (Tensor.double, torch.float64), (Tensor.half, torch.float16),
    (Tensor.bfloat16, torch.bfloat16), (Tensor.long, torch.int64), (Tensor.int, torch.int32),
    (Tensor.short, torch.int16), (Tensor.char, torch.int8), (Tensor.byte, torch.uint8), (Tensor.bool, torch.bool),
):  # fmt: skip
    decomposition(_method, signature="x, memory_format=None")(_casting(_dtype))


spelling("clamp", aten.clamp_min.default, aten.clamp_min.Tensor, signature="x, min")
spelling("clamp", aten.clamp_max.default, aten.clamp_max.Tensor, signature="x, max")
spelling("clamp", aten.clamp_min_.default, aten.clamp_min_.Tensor, signature="x, min")
spelling("clamp", aten.clamp_max_.default, aten.clamp_max_.Tensor, signature="x, max")
spelling("prelu", aten._prelu_kernel.default)

"""PyTorch's spellings of the pointwise family: functions, methods, operators, in-place forms and overloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import Decomposition, Rule, find_rule
from hyper_parallel.core.shard.rules import load, pointwise
from hyper_parallel.platform.torch.op_line import Line

__all__ = ["LOCAL", "add_functions", "add_overloads", "keyword_call", "routed"]

Spell = Callable[..., None]
nn = torch._C._nn  # noqa: SLF001 - where PyTorch keeps activations
aten = torch.ops.aten

UNARY = f"{pointwise.STEPWISE} {pointwise.NONLINEAR} neg deg2rad rad2deg frexp".split()
BINARY = f"{pointwise.BINARY} add sub rsub mul div".split()
OTHERS = ["lerp", "addcmul", "addcdiv", "clamp", "masked_fill"]
LIKES = ("zeros_like", "ones_like", "empty_like", "full_like")
NEW = ("new_zeros", "new_ones", "new_empty", "new_full")
SYNONYMS = {
    "abs": "absolute", "neg": "negative", "trunc": "fix", "mul": "multiply", "sub": "subtract", "clamp": "clip",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "ne": "not_equal", "atan2": "arctan2",
    "logsigmoid": "log_sigmoid", "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh",
    "acosh": "arccosh", "atanh": "arctanh", "sigmoid": "expit", "lgamma": "gammaln", "digamma": "psi",
    "igamma": "gammainc", "igammac": "gammaincc", "mvlgamma": "multigammaln",
}  # fmt: skip
DUNDERS = {
    "add": "add radd", "sub": "sub", "mul": "mul rmul", "div": "truediv div", "floor_divide": "floordiv",
    "remainder": "mod", "pow": "pow", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
    "bitwise_and": "and rand", "bitwise_or": "or ror", "bitwise_xor": "xor rxor", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
}  # fmt: skip
REVERSED = {
    "sub": "rsub", "div": "rtruediv rdiv", "floor_divide": "rfloordiv", "remainder": "rmod", "pow": "rpow",
    "bitwise_left_shift": "rlshift", "bitwise_right_shift": "rrshift",
}  # fmt: skip
WRITING = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "truediv div", "floor_divide": "floordiv", "remainder": "mod",
    "pow": "pow", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
}  # fmt: skip
CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip


def keyword_call(func: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """``func`` as a function of canonical parameter names."""
    parameters = binder(signature).parameters.values()
    plain = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    return lambda **given: func(*[given[name] for name in plain], **{name: given[name] for name in named})


def by_name(lines: Iterable[Line]) -> dict[str, Callable[..., Any]]:
    """The canonical operators of ``lines`` that are rules, each by the first spelling that has its arguments."""
    load()
    found: dict[str, Callable[..., Any]] = {}
    for line in lines:
        if line.canonical:
            continue  # the spelling cannot run on locals as it is
        rule = find_rule(line.op)
        assert rule is not None, line.op  # noqa: S101 - the rules are loaded
        signature = line.signature or rule.signature
        if isinstance(rule, Rule) and set(binder(signature).names) == set(binder(rule.signature).names):
            found.setdefault(line.op, keyword_call(line.funcs[0], signature))
    return found


def _spellings(name: str) -> list[Callable[..., Any]]:
    names = [name, *SYNONYMS.get(name, "").split()]
    found = [getattr(home, one, None) for one in names for home in (torch, Tensor, torch.special, F, nn)]
    return [one for one in dict.fromkeys(found) if callable(one)]


def _is_wrapped(func: Callable[..., Any]) -> bool:
    # The Python functions of torch.nn.functional take inplace= and are routed below.
    return getattr(func, "__module__", "") == "torch.nn.functional"


def _local_functions() -> dict[str, Callable[..., Any]]:
    local = {}
    for name in (*UNARY, *BINARY, *OTHERS, "where"):
        func = next((one for one in _spellings(name) if not _is_wrapped(one)), None) or getattr(F, name)
        local[name] = keyword_call(func, find_rule(name).signature)  # type: ignore[union-attr] # the family is loaded
    local["polygamma"] = lambda x, n: torch.polygamma(n, x)
    local["dropout_backward"] = lambda x, mask, scale: aten.native_dropout_backward(x, mask, scale)
    for name in ("linspace", "logspace"):
        local[name] = keyword_call(getattr(torch, name), find_rule(name).signature)  # type: ignore[union-attr] # as above
    local["new_empty_strided"] = lambda x, size, stride, **options: x.new_empty_strided(size, stride, **options)
    local["gelu"] = lambda x, approximate: F.gelu(x, approximate=approximate)
    local["clone"] = lambda x, memory_format: x.clone()  # noqa: ARG005 - locals are dense
    local["detach"] = lambda x: x.detach()
    local["contiguous"] = lambda x, memory_format: x.contiguous()  # noqa: ARG005 - the same
    local["copy"] = lambda x, y, non_blocking: x.copy_(y, non_blocking)
    local["zero"] = lambda x: x.zero_()
    local["fill"] = lambda x, value: x.fill_(value)
    for name in (*LIKES, *NEW):
        func = getattr(torch, name, None) or getattr(Tensor, name)
        local[name] = keyword_call(func, find_rule(name).signature)  # type: ignore[union-attr] # as above
    local["cast"] = lambda x, dtype, device, non_blocking, copy, memory_format: x.to(  # noqa: ARG005
        device=device, dtype=dtype, non_blocking=non_blocking, copy=copy
    )
    return local


def _add_unary_and_binary(spell: Spell) -> None:
    for name in (*UNARY, *BINARY, *OTHERS):
        for func in _spellings(name):
            if not _is_wrapped(func):
                spell(name, func, "n, x" if name == "polygamma" and func is not Tensor.polygamma else None)
        for home in (torch, Tensor, nn):
            for one in (name, *SYNONYMS.get(name, "").split()):
                writing = getattr(home, f"{one}_", None)
                if writing is not None:
                    spell(name, writing, in_place=True)


def _add_operators(spell: Spell) -> None:
    for name, dunders in DUNDERS.items():
        for one in dunders.split():
            _spell_dunder(spell, name, f"__{one}__")
    for name, dunders in REVERSED.items():
        for one in dunders.split():
            _spell_dunder(spell, name, f"__{one}__", _swapped(name))
    for name, dunders in WRITING.items():
        for one in dunders.split():
            _spell_dunder(spell, name, f"__i{one}__", in_place=True)
    spell("abs", Tensor.__abs__)
    spell("neg", Tensor.__neg__)
    spell("bitwise_not", Tensor.__invert__)
    spell("div", torch.true_divide)
    spell("div", torch.divide)
    spell("div", Tensor.true_divide)
    spell("div", Tensor.divide)
    spell("div", Tensor.divide_, in_place=True)
    spell("div", Tensor.true_divide_, in_place=True)


def _swapped(name: str) -> str:
    return "y, x, *, rounding_mode=None" if name == "div" else "y, x, *, alpha=1" if name == "sub" else "y, x"


def _spell_dunder(
    spell: Spell, name: str, dunder: str, signature: str | None = None, *, in_place: bool = False
) -> None:
    func = getattr(Tensor, dunder, None)
    if func is not None:
        spell(name, func, signature, in_place=in_place)


def _add_the_rest(spell: Spell) -> None:
    spell("where", Tensor.where, "x, condition, y")
    spell("clone", torch.clone)
    spell("clone", Tensor.clone)
    spell("contiguous", Tensor.contiguous)
    spell("detach", torch.detach)
    for name in LIKES:
        spell(name, getattr(torch, name))
    for name in (*NEW, "new_empty_strided"):
        spell(name, getattr(Tensor, name))
    for name in ("linspace", "logspace"):
        spell(name, getattr(torch, name))
    spell("copy", Tensor.copy_, in_place=True)
    spell("zero", Tensor.zero_, in_place=True)
    spell("zero", torch.zero_, in_place=True)
    spell("fill", Tensor.fill_, in_place=True)
    spell("fill", torch.fill_, in_place=True)
    spell("fill", torch.fill)


# -- calls that are other calls ----------------------------------------------------------------------------------------


def routed(table: dict[Any, OpEntry], func: Callable[..., Any], signature: str, run: Callable[..., Any]) -> None:
    """Let ``func`` be what ``run(ops, **arguments)`` makes of its arguments: further calls on DTensors."""
    name = getattr(func, "__name__", str(func))
    table[func] = OpEntry(name, func, binder(signature), Decomposition(name, signature, run), func)


IN_PLACE_OPTION: dict[Any, tuple[str, Any, Any]] = {
    F.relu: ("", torch.relu, torch.relu_),
    F.relu6: ("", nn.relu6, nn.relu6_),
    F.silu: ("", nn.silu, nn.silu_),
    F.mish: ("", nn.mish, nn.mish_),
    F.hardswish: ("", nn.hardswish, nn.hardswish_),
    F.hardsigmoid: ("", nn.hardsigmoid, nn.hardsigmoid_),
    F.selu: ("", torch.selu, torch.selu_),
    F.celu: ("alpha=1.0", torch.celu, torch.celu_),
    F.elu: ("alpha=1.0", nn.elu, nn.elu_),
    F.leaky_relu: ("negative_slope=0.01", nn.leaky_relu, nn.leaky_relu_),
    F.hardtanh: ("min_val=-1.0, max_val=1.0", nn.hardtanh, nn.hardtanh_),
}


def _add_routes(table: dict[Any, OpEntry]) -> None:
    for func, (arguments, plain, writing) in IN_PLACE_OPTION.items():
        signature = ", ".join(part for part in ("x", arguments, "inplace=False") if part)
        routed(table, func, signature, _in_place_option(plain, writing))
    options = "dtype=None, device=None, non_blocking=False, copy=False, memory_format=None"
    routed(table, Tensor.to, f"x, *args, {options}", _to)
    routed(table, Tensor.type_as, "x, y", lambda ops, x, y: _cast_to(ops, x, y.dtype))
    for name, dtype in CASTS.items():
        routed(table, getattr(Tensor, name), "x, memory_format=None", _casting(dtype))


def _in_place_option(plain: Callable[..., Any], writing: Callable[..., Any]) -> Callable[..., Any]:
    def run(ops: Any, x: Any, inplace: bool, **rest: Any) -> Any:
        del ops
        return (writing if inplace else plain)(x, *rest.values())

    return run


def _casting(dtype: torch.dtype) -> Callable[..., Any]:
    def run(ops: Any, x: Any, memory_format: Any) -> Any:
        del memory_format
        return _cast_to(ops, x, dtype)

    return run


def _cast_to(ops: Any, x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else ops.cast(x, dtype=dtype)


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
    if not copy and dtype in (None, x.dtype) and (device is None or _same_device(device, x.device)):
        return x
    return ops.cast(x, dtype=dtype, device=device, non_blocking=(flags or [options["non_blocking"]])[0], copy=copy)


def _same_device(wanted: torch.device, held: torch.device) -> bool:
    return wanted.type == held.type and wanted.index in (None, held.index)


def add_functions(table: dict[Any, OpEntry], spell: Spell) -> None:
    """Add every spelling of the Python API."""
    _add_unary_and_binary(spell)
    _add_operators(spell)
    _add_the_rest(spell)
    _add_routes(table)


# -- overloads ---------------------------------------------------------------------------------------------------------

OVERLOADS = ("where", "clone", "detach", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones",
             "new_empty", "new_empty_strided", "new_full", "contiguous", "linspace", "logspace")  # fmt: skip


def add_overloads(spell: Spell) -> None:
    """Add what arrives from C++."""
    for name in (*UNARY, *BINARY, *OTHERS, *OVERLOADS):
        signature = "n, x" if name == "polygamma" else None
        for packet in (name, f"special_{name}"):
            _spell_packet(spell, name, packet, signature)
        if name not in OVERLOADS:
            _spell_packet(spell, name, f"{name}_", in_place=True)
    for name in ("copy", "zero", "fill"):
        _spell_packet(spell, name, f"{name}_", in_place=True)
    _spell_packet(spell, "fill", "fill")
    spell("dropout_backward", aten.native_dropout_backward.default)
    spell("clone", aten.alias_copy.default, "x, *, memory_format=None")
    spell(
        "cast",
        aten._to_copy.default,  # noqa: SLF001 - an operator's name
        "x, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None",
    )


def _spell_packet(
    spell: Spell, name: str, packet: str, signature: str | None = None, *, in_place: bool = False
) -> None:
    found = getattr(aten, packet, None)
    for one in [] if found is None else found.overloads():
        if "out" not in one:
            spell(name, getattr(found, one), signature, in_place=in_place)


LOCAL = _local_functions()

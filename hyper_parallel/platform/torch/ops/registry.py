"""Registry of PyTorch's operators: spellings, kernels and decompositions.

``spelling`` names the calls that are one canonical operator, ``kernel`` defines the operator on plain local tensors,
``decomposition`` defines a call in terms of canonical operators. Each family's file registers its own; the tables are
built once, with the platform.

A call is a function, a method, an operator overload, or a name: ``"mm"`` stands for ``torch.mm`` and ``Tensor.mm``,
each where this release has it. A call whose name ends in an underscore writes its first operand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.entry import KeywordCall, OpEntry, binder
from hyper_parallel.core.shard.rule import Decomposition, Rule, find_rule
from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.torch.versions import OpOverload, functional

__all__ = [
    "aten",
    "decomposition",
    "functions",
    "functions_named",
    "kernel",
    "local_op",
    "nn",
    "overloads",
    "overloads_named",
    "signature_of",
    "spelling",
]

aten = torch.ops.aten
nn = functional

Call = Callable[..., Any]
Condition = Callable[[dict[str, Any]], bool]
_C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)

rules.load()


@dataclass(frozen=True)
class _Spelling:
    op: str
    calls: tuple[Call, ...]
    signature: str
    canonical: bool


_SPELLINGS: list[_Spelling] = []
_KERNELS: dict[str, Call] = {}
_DECOMPOSED: dict[Call, OpEntry] = {}
_DIRECT: dict[Call, tuple[str, Condition]] = {}
_COPIED_BACK: list[Call] = []
_IN_PLACE: set[Call] = set()


def spelling(
    op: str,
    *calls: Call | str,
    signature: str | None = None,
    canonical: bool = False,
    in_place: bool = False,
    copies_back: bool = False,
) -> None:
    """Register ``calls`` as canonical operator ``op``.

    Args:
        op: the canonical name.
        calls: functions, methods or overloads; by default those named ``op``.
        signature: parameters of the calls, in canonical names; None if they are those of the rule.
        canonical: run the operator's kernel on local tensors, because the calls do not work there.
        in_place: whether a call without a trailing underscore writes its first operand (``__iadd__``).
        copies_back: ``Tensor.<name>_`` has no rule: it runs the first call and copies the result into ``self``.

    Raises:
        ValueError: the operator has no rule.
    """
    resolved = _resolved(calls or (op,))
    _SPELLINGS.append(_Spelling(op, resolved, signature or signature_of(op), canonical))
    if in_place:
        _IN_PLACE.update(resolved)
    if copies_back:
        _COPIED_BACK.append(getattr(Tensor, resolved[0].__name__))


def kernel(*ops: str) -> Callable[[Call], Call]:
    """Register a function as the kernel of ``ops``; it is called with keyword arguments.

    An operator without one runs the first spelling that takes the rule's own arguments.

    Raises:
        ValueError: an operator has a kernel already.
    """

    def declare(function: Call) -> Call:
        for op in ops:
            if op in _KERNELS:
                msg = f"canonical operator {op!r} already has a kernel"
                raise ValueError(msg)
            in_c = isinstance(function, _C_FUNCTIONS)  # parameter names of C functions differ from the rule's
            _KERNELS[op] = KeywordCall(function, signature_of(op)) if in_c else function
        return function

    return declare


def decomposition(
    *calls: Call | str,
    signature: str,
    op: str | None = None,
    copies_back: bool = False,
    unless: tuple[str, Condition] | None = None,
) -> Callable[[Call], Call]:
    """Register ``run(ops, **arguments)`` as the implementation of ``calls`` on DTensors.

    Args:
        calls: the calls, as users may write them.
        signature: parameters of the calls, with the names that ``run`` uses.
        op: the name of the operation, if it differs from that of the call.
        copies_back: as for :func:`spelling`.
        unless: a canonical operator with the parameters of the calls, and a predicate on bound arguments. If the
            predicate is false, the call runs this operator; if it is true, the call runs ``run``.
    """

    def declare(run: Call) -> Call:
        resolved = _resolved(calls)
        for call in resolved:
            name = getattr(call, "__name__", str(call))
            made_of = Decomposition(op or name, signature, run)
            _add(_DECOMPOSED, call, OpEntry(name, call, binder(signature), made_of, call))
            if unless is not None:
                _DIRECT[call] = unless
        if copies_back:
            _COPIED_BACK.append(getattr(Tensor, resolved[0].__name__))
        return run

    return declare


def signature_of(op: str) -> str:
    """The parameters of canonical operator ``op``, as its rule has them.

    Raises:
        ValueError: the operator has no rule.
    """
    rule = find_rule(op)
    if rule is None:
        msg = f"canonical operator {op!r} has no rule"
        raise ValueError(msg)
    return rule.signature


# -- calls by their names ----------------------------------------------------------------------------------------------


def functions_named(name: str) -> list[Call]:
    """Every function and method of that name, and those with an underscore at the end, which write."""
    plain = [getattr(home, name, None) for home in (torch, Tensor, torch.special, F, nn)]
    writing = [getattr(home, f"{name}_", None) for home in (torch, Tensor, nn)]
    # The Python functions of torch.nn.functional take inplace=; they are decompositions.
    return [
        call
        for call in dict.fromkeys((*plain, *writing))
        if callable(call) and getattr(call, "__module__", "") != "torch.nn.functional"
    ]


def overloads_named(*packets: str) -> list[Call]:
    """The overloads of those operators in this release, except those with ``out=``."""
    present = [getattr(aten, name) for name in packets if hasattr(aten, name)]
    return [getattr(packet, name) for packet in present for name in packet.overloads() if "out" not in name]


def _resolved(calls: tuple[Call | str, ...]) -> tuple[Call, ...]:
    resolved: list[Call] = []
    for call in calls:
        if isinstance(call, str):
            resolved.extend(getattr(home, call) for home in (torch, Tensor) if hasattr(home, call))
        else:
            resolved.append(call)
    return tuple(dict.fromkeys(resolved))


def _writes(call: Call) -> bool:
    name = getattr(call, "__name__", "").split(".")[0]  # for an overload, the name of its packet
    return call in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


# -- look-up tables ----------------------------------------------------------------------------------------------------


@cache
def functions() -> dict[Any, OpEntry]:
    """Entries by Python function or method."""
    return {call: entry for call, entry in _table().items() if not isinstance(call, OpOverload)}


@cache
def overloads() -> dict[Any, OpEntry]:
    """Entries by operator overload."""
    return {call: entry for call, entry in _table().items() if isinstance(call, OpOverload)}


@cache
def local_op(op: str) -> Call:
    """The canonical operator on plain tensors: its kernel, or else a spelling of it.

    Raises:
        KeyError: there is neither.
    """
    kernels = _kernels()
    if op in kernels:
        return kernels[op]
    for line in _SPELLINGS:
        if line.op == op and isinstance(find_rule(op), Rule):
            return KeywordCall(line.calls[0], line.signature)
    raise KeyError(op)


@cache
def _kernels() -> dict[str, Call]:
    """The kernels; for an operator without one, the first spelling that takes the rule's arguments."""
    kernels = dict(_KERNELS)
    for line in _SPELLINGS:
        rule = find_rule(line.op)
        if line.op in kernels or line.canonical or not isinstance(rule, Rule):
            continue
        if set(binder(line.signature).names) == set(binder(rule.signature).names):
            kernels[line.op] = KeywordCall(line.calls[0], line.signature)
    return kernels


@cache
def _table() -> dict[Call, OpEntry]:
    return _build(_kernels())


def _build(kernels: dict[str, Call]) -> dict[Call, OpEntry]:
    table = dict(_DECOMPOSED)
    for call, (op, unless) in _DIRECT.items():
        rule = find_rule(op)
        assert isinstance(rule, Rule)
        table[call].plan_directly(rule, kernels[op], unless)
    for line in _SPELLINGS:
        rule = find_rule(line.op)
        assert rule is not None
        for call in line.calls:
            entry = OpEntry(
                getattr(call, "__name__", str(call)),
                call,
                binder(line.signature),
                rule,
                kernels.get(line.op, call),
                canonical=line.canonical,
                in_place=_writes(call),
            )
            _add(table, call, entry)
    for plain in _COPIED_BACK:
        call = getattr(Tensor, f"{plain.__name__}_")
        signature = table[plain].binder.text
        run = partial(_copy_back, table[plain])
        name = call.__name__
        _add(table, call, OpEntry(name, call, binder(signature), Decomposition(name, signature, run), call))
    return table


def _add(table: dict[Call, OpEntry], call: Call, entry: OpEntry) -> None:
    if call in table:
        msg = f"{entry.name} is registered twice: as {table[call].rule.op!r} and as {entry.rule.op!r}"
        raise ValueError(msg)
    table[call] = entry


def _copy_back(plain: OpEntry, ops: Any, **arguments: Any) -> Any:
    """Compute, then copy the result into the first operand: its shape and dtype stay.

    Raises:
        LayoutError: the result has a different shape or dtype.
    """
    del ops
    parameters = plain.binder.parameters
    keywords = {
        name: arguments.pop(name) for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
    }
    x, *rest = arguments.values()
    # Backward may need the values that are overwritten.
    source = x.clone() if x.requires_grad and torch.is_grad_enabled() else x
    result = plain.func(source, *rest, **keywords)
    if result.shape != x.shape or result.dtype != x.dtype:
        msg = f"{plain.name}_: the result is {result.dtype} {list(result.shape)}, and x is {x.dtype} {list(x.shape)}"
        raise LayoutError(msg)
    return x.copy_(result)

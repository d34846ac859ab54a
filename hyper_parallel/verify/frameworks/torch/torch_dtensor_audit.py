"""Makes PyTorch's DTensor a target of the operator audit: public calls, wrapping, differentiation, global values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import tensor as peer
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.entry import Binder, OpEntry
from hyper_parallel.platform.torch.ops.registry import functions, local_op

__all__ = ["Form", "Peer", "public_calls"]

_HOMES = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "torch._C._special")
"""Modules whose functions users call; functions without a module are methods of ``Tensor``."""


@dataclass(frozen=True)
class Form:
    """One public call of an operator; it takes the operator's arguments by canonical name.

    Attributes:
        function: function of PyTorch.
        binder: parameters of the function, in canonical names.
        positional: names of the arguments that are passed by position.
        named: names of the arguments that are passed by name.
    """

    function: Callable[..., Any]
    binder: Binder
    positional: tuple[str, ...]
    named: tuple[str, ...]

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the named arguments."""
        in_order: list[Any] = []
        for name in self.positional:
            value = values.get(name, self.binder.parameters[name].default)
            starred = name == self.binder.starred
            in_order.extend(value if starred else [value])
        return in_order, {name: values[name] for name in self.named}

    def __call__(self, **values: Any) -> Any:
        """Call the function."""
        in_order, named = self.arguments(values)
        return self.function(*in_order, **named)


def public_calls(
    op: str, arguments: Mapping[str, Any], canonical: Binder, *, writes: bool
) -> list[tuple[str, Callable[..., Any]]]:
    """Return PyTorch's public functions and methods for an operator that take ``arguments``, functions first.

    Args:
        op: canonical name.
        arguments: arguments of the call by canonical name, including defaults.
        canonical: the operator's parameters.
        writes: whether to return functions that write their first operand.

    Returns:
        pairs of a name and a function that takes the canonical arguments by keyword; PyTorch may reject some of these
        calls. The last one is the operator's kernel, for operators that exist only in ``aten``.
    """
    defaults = {name: parameter.default for name, parameter in canonical.parameters.items()}
    passed = [name for name, value in arguments.items() if not _is_default(value, defaults[name])]
    calls: list[tuple[str, Callable[..., Any]]] = [
        (_name(entry.func, entry.name), call)
        for entry in _spellings().get(op, ())
        if entry.in_place == writes and _takes(entry.binder, passed)
        for call in _forms(entry.func, entry.binder, passed)
    ]
    if writes:
        return calls
    if op not in _spellings():
        functions_of_name = [getattr(home, op) for home in (F, torch) if hasattr(home, op)]
        calls += [(_name(call, op), form) for call in functions_of_name for form in _forms(call, canonical, passed)]
    with suppress(KeyError):
        calls.append((f"kernel of {op}", local_op(op)))
    return calls


def _name(call: Callable[..., Any], name: str) -> str:
    home = getattr(call, "__module__", None)
    return f"Tensor.{name}" if home is None else f"{'F' if 'nn' in home else 'torch'}.{name}"


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and isinstance(value, (int, float, str)) and value == default
    )


def _takes(binder: Binder, passed: Sequence[str]) -> bool:
    """Whether every passed argument is a parameter, and every other parameter has a default."""
    kinds = inspect.Parameter
    required = {
        name
        for name, parameter in binder.parameters.items()
        if parameter.default is kinds.empty and parameter.kind is not kinds.VAR_POSITIONAL
    }
    return required <= set(passed) <= set(binder.names)


@cache
def _spellings() -> dict[str, list[OpEntry]]:
    """Return PyTorch's public functions and methods by canonical operator, functions first."""
    entries: dict[str, list[OpEntry]] = {}
    for call, entry in functions().items():
        home = getattr(call, "__module__", None)
        if not entry.name.startswith("_") and (home is None or home in _HOMES):
            entries.setdefault(entry.rule.op, []).append(entry)
    for calls in entries.values():
        calls.sort(key=lambda entry: getattr(entry.func, "__module__", None) is None)
    return entries


def _forms(function: Callable[..., Any], binder: Binder, passed: Sequence[str]) -> list[Form]:
    """Return several forms of a call with the arguments ``passed``, because PyTorch names some parameters differently.

    The forms are: all arguments by position, including defaults between them; options by keyword; all arguments by
    position, without these defaults.
    """
    kinds = inspect.Parameter
    parameters = [p for p in binder.parameters.values() if p.kind is not kinds.KEYWORD_ONLY]
    last = max((at for at, parameter in enumerate(parameters) if parameter.name in passed), default=-1)
    in_order = [parameter.name for parameter in parameters[: last + 1]]
    required = [p.name for p in parameters if p.default is kinds.empty]
    splits = [
        (in_order, [name for name in passed if name not in in_order]),
        (required, [name for name in passed if name not in required]),
        (list(passed), []),
    ]
    return [Form(function, binder, tuple(positional), tuple(named)) for positional, named in splits]


class Peer:
    """One rank of a one-dimensional mesh that runs PyTorch's own DTensor.

    Args:
        world: number of ranks of ``torch.distributed``, which is initialised.
    """

    def __init__(self, world: int) -> None:
        self.mesh = init_device_mesh("cpu", (world,))

    def wrap(self, local: Any, placement: Placement, shape: Sequence[int], *, differentiated: bool = False) -> Any:
        """Return a DTensor of global ``shape`` whose local tensor on this rank is ``local``, as a leaf of autograd."""
        theirs: Any = peer.Replicate()
        if isinstance(placement, Shard):
            theirs = peer.Shard(placement.dim)
        elif isinstance(placement, Partial):
            theirs = peer.Partial(placement.reduce_op)
        wrapped = peer.DTensor.from_local(
            torch.from_numpy(local), self.mesh, [theirs], run_check=False,
            shape=torch.Size(shape), stride=torch.empty(tuple(shape)).stride(),
        )  # fmt: skip
        return wrapped.requires_grad_(differentiated)

    @staticmethod
    def is_wrapped(value: Any) -> bool:
        """Whether ``value`` is distributed."""
        return isinstance(value, peer.DTensor)

    @staticmethod
    def whole(value: Any) -> Any:
        """Return the global values as an array."""
        return value.detach().full_tensor().resolve_conj().resolve_neg().contiguous().numpy()

    @staticmethod
    def backward(outs: Sequence[Any], seeds: Sequence[Any]) -> None:
        """Run backward from those outputs that have a cotangent (seed) and need a gradient."""
        pairs = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if seed is not None and out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [seed for _, seed in pairs])

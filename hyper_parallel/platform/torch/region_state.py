"""The state that a compiled graph depends on, apart from tensors: attributes, hooks, submodules and modes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hyper_parallel.core.dtensor.events import watchers
from hyper_parallel.core.dtensor.mesh import get_current_mesh
from hyper_parallel.core.dtensor.skip_dispatch import open_blocks
from hyper_parallel.core.shard.dispatch import implicitly_replicates
from hyper_parallel.core.shard.rules.loss import is_vocab_parallel
from hyper_parallel.errors import PlanError, UnsupportedOperatorError
from hyper_parallel.platform.torch.versions import (
    function_mode_enabled,
    global_module_hooks,
    len_dispatch_stack,
    transforms_active,
)

__all__ = ["SHARDED", "HookRefusal", "ModuleState", "ModuleTensors", "content", "has_fields", "is_observed", "modes"]

_PACKAGE = "hyper_parallel."
_RESHARDING = "hyper_parallel.core.tensor_parallel.saved_inputs"
_LIBRARIES = {"hyper_parallel", "torch", "numpy"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SHARDED = "_hyper_parallel_fully_sharded"
"""Attribute of modules to which fully_shard was applied."""
_REGISTERING = {  # functions that register hooks of tensors
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    torch.Tensor.retain_grad: "retain_grad",
}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset)


class HookRefusal(TorchFunctionMode):
    """Refuses hooks of tensors during a trace, because graphs would replay their operators instead of calling them.

    Args:
        name: name of the class of the module that is traced.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, unless it registers a hook."""
        del types
        registered = _REGISTERING.get(func)
        if registered is None:
            return func(*args, **(kwargs or {}))
        msg = (
            f"compile: forward of {self._name} calls {registered} of a tensor, which a graph would not call again; "
            "register hooks on the result of the compiled module or on its parameters, outside of its forward"
        )
        raise UnsupportedOperatorError(msg)


def is_observed() -> bool:
    """Whether something observes single calls, such as a hook; a graph must not replace the calls then."""
    return bool(
        watchers()
        or open_blocks()
        or len_dispatch_stack()
        or function_mode_enabled()
        or transforms_active()
        or torch.is_inference_mode_enabled()
        or any(global_module_hooks())
    )


def modes(device: str) -> tuple[Any, ...]:
    """Return the modes that affect calls."""
    cast = torch.is_autocast_enabled(device)
    return (
        torch.is_grad_enabled(),
        cast and torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
        implicitly_replicates(),
        is_vocab_parallel(),
        get_current_mesh(),
    )


class ModuleState:
    """The current attributes of a module and its submodules.

    Args:
        root: the compiled module; its own hooks run outside of the graph.

    Raises:
        PlanError: a submodule is fully sharded, or the program has registered hooks on it.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.named_modules())
        self._dicts = [vars(module) for _, module in modules]
        self._values = list(itertools.chain.from_iterable(map(dict.values, self._dicts)))
        self._children = [module._modules for _, module in modules]  # noqa: SLF001 - no public spelling
        self._submodules = list(itertools.chain.from_iterable(map(dict.values, self._children)))
        self._hooks = [getattr(module, name) for path, module in modules if path for name in _HOOKS]
        self._hook_count = sum(map(len, self._hooks))
        changeable = {
            id(value): value
            for attributes in self._dicts
            for name, value in attributes.items()
            if name not in _ELSEWHERE and (_is_container(value) or has_fields(value))
        }  # many submodules may share a configuration
        self._contents = [(value, content(value)) for value in changeable.values()]
        for path, module in modules:
            if path:
                _check(path, module)
        self.key = tuple((path, *_key(vars(module))) for path, module in modules)

    def holds(self) -> bool:
        """Whether all attributes are still the same objects, with the same contents."""
        return (
            all(map(is_, itertools.chain.from_iterable(map(dict.values, self._dicts)), self._values))
            and sum(map(len, self._dicts)) == len(self._values)
            and all(map(is_, itertools.chain.from_iterable(map(dict.values, self._children)), self._submodules))
            and sum(map(len, self._children)) == len(self._submodules)
            and sum(map(len, self._hooks)) == self._hook_count
            and all(content(value) == before for value, before in self._contents)
        )

    def difference(self, later: ModuleState) -> str | None:
        """Return the first attribute that differs in ``later``, or None."""
        for before, after in zip(self.key, later.key, strict=False):
            for one, other in zip(before[1:], after[1:], strict=False):
                if one != other:
                    return ".".join(filter(None, (before[0], other[0])))
            if len(before) != len(after):
                return ".".join(filter(None, (before[0], after[-1][0])))
        return None if len(self.key) == len(later.key) else "its submodules"


@dataclass(frozen=True)
class ModuleTensors:
    """The places of a module's parameters and buffers: dictionaries and names in them.

    Attributes:
        places: path, dictionary and name of each; tied ones once.
        tied: dictionary and name of each further occurrence, and of its first place.
        absent: dictionary and name of entries that are None.
        homes: the dictionaries.
        count: number of their entries.
    """

    places: list[tuple[str, dict[str, Any], str]]
    tied: list[tuple[dict[str, Any], str, dict[str, Any], str]]
    absent: list[tuple[dict[str, Any], str]]
    homes: list[dict[str, Any]]
    count: int

    @classmethod
    def of(cls, root: nn.Module) -> ModuleTensors:
        """Find the tensors of ``root``."""
        found = cls([], [], [], [], 0)
        first: dict[int, tuple[dict[str, Any], str]] = {}
        for path, module in root.named_modules():
            for home in (module._parameters, module._buffers):
                found.homes.append(home)
                for name, value in home.items():
                    if value is None:
                        found.absent.append((home, name))
                    elif id(value) in first:
                        found.tied.append((home, name, *first[id(value)]))
                    else:
                        first[id(value)] = (home, name)
                        found.places.append((f"{path}.{name}" if path else name, home, name))
        return cls(found.places, found.tied, found.absent, found.homes, sum(map(len, found.homes)))

    def hold(self) -> bool:
        """Whether the tensors are still in these places."""
        return (
            sum(map(len, self.homes)) == self.count
            and all(home[name] is None for home, name in self.absent)
            and all(home[name] is other[first] for home, name, other, first in self.tied)
        )


def _check(path: str, module: nn.Module) -> None:
    if SHARDED in vars(module):
        msg = (
            f"compile: fully_shard was applied to {path}, a submodule of the compiled module; compile modules that "
            "fully_shard gathers at once, such as each block"
        )
        raise PlanError(msg)
    for name in _HOOKS:
        for hook in getattr(module, name).values():
            owner = getattr(getattr(hook, "func", hook), "__module__", "") or ""
            if owner == _RESHARDING:
                msg = (
                    f"compile: input_reshard was applied to {path} or around it, but a compiled graph keeps what it "
                    "saves as it is; compile, or call input_reshard, not both"
                )
                raise PlanError(msg)
            if not owner.startswith(_PACKAGE):
                msg = (
                    f"compile: {path} has a hook, {getattr(hook, '__qualname__', repr(hook))}, which a compiled graph "
                    "would not call; register it on the compiled module itself, or do not compile"
                )
                raise PlanError(msg)


def _is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) and not isinstance(value, tuple)


def has_fields(value: Any) -> bool:
    """Whether ``value`` is an object of the program whose attributes may change, such as a configuration."""
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, (*_PLAIN, Enum, ModuleType))
        and type(value).__module__.partition(".")[0] not in _LIBRARIES
    )


def content(value: Any, holders: tuple[int, ...] = ()) -> Any:
    """Copy the plain values in containers and in objects with fields; other objects are represented by their identity.

    Args:
        value: the value to copy.
        holders: identities of the objects that contain it.
    """
    if isinstance(value, _PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    if id(value) in holders:
        return "holder", holders.index(id(value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(value)
    fields = value if isinstance(value, dict) else vars(value) if has_fields(value) else None
    holders = (*holders, id(value))
    if fields is not None:
        return type(value), [(key, content(item, holders)) for key, item in fields.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [content(item, holders) for item in value]
    return id(value)


# Checked elsewhere: tensors are arguments of the graph, submodules are listed, hooks are counted.
_ELSEWHERE = (frozenset(vars(nn.Module())) | {"forward"}) - {"training"}


def _key(attributes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, repr(content(value))) for name, value in attributes.items() if name not in _ELSEWHERE)

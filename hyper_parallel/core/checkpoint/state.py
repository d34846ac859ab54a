"""A nested state as named tensors and a tree of plain values, which can be written as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.select import current_platform, platform_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hyper_parallel.core.checkpoint.folder import Entry
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Flat", "Path", "merge", "name_of", "platform_of_state", "subtree"]

Path = tuple[Any, ...]
"""Keys and indices that lead from the state to a part of it."""

_PLAIN = (str, int, float, bool, type(None))


class Flat:
    """A state, split into tensors and plain values.

    A state is a module, a tensor, a plain value, an object with ``state_dict`` and ``load_state_dict``, or a
    dictionary, list or tuple of states. A module is the dictionary of its parameters and persistent buffers.

    Args:
        state: the state.
        platform: the framework of its tensors.
        saved: tensors in a checkpoint, from which the state of an optimizer that has not stepped is completed.

    Attributes:
        tensors: tensors by their names, path segments joined by dots.
        tree: the values, with ``{"tensor": name}`` instead of tensors.
        objects: objects with ``load_state_dict`` by their paths, the keys and indices that lead to them.
        ties: tied parameters: other names of a tensor, with its name in ``tensors``.
        unstepped: names of state dicts of optimizers that have not stepped, given without their optimizer.

    Raises:
        CheckpointError: (a ValueError) the state holds a value of another type, or two tensors have one name.
    """

    def __init__(self, state: Any, platform: Platform, saved: Mapping[str, Entry] | None = None) -> None:
        self._platform, self._saved = platform, saved or {}
        self.tensors: dict[str, Any] = {}
        self.objects: dict[Path, Any] = {}
        self.ties: dict[str, str] = {}
        self.unstepped: list[str] = []
        self._names: dict[int, str] = {}
        self.tree = self._add("", (), state)

    def _add_tensor(self, name: str, tensor: Any, identity: int) -> Any:
        """Add a tensor; tensors with the same ``identity`` are tied."""
        if name in self.tensors or name in self.ties:
            msg = f"save: two tensors of the state are named {name}; rename one"
            raise CheckpointError(msg)
        first = self._names.setdefault(identity, name)
        if first == name:
            self.tensors[name] = tensor
        else:
            self.ties[name] = first
        return {"tensor": first}

    def _add_module(self, name: str, path: Path, module: Any) -> Any:
        """Add a module; its state dict has new tensors, so ties are found by the identities of its parameters."""
        platform = self._platform
        parameters = platform.parameters_dict(module)
        items = []
        for key, value in platform.get_model_state_dict(module).items():
            if key in parameters:
                items.append([key, self._add_tensor(_join(name, key), value, id(parameters[key]))])
            else:
                items.append([key, self._add(_join(name, key), (*path, key), value)])
        return {"items": items}

    def _add(self, name: str, path: Path, state: Any) -> Any:
        platform = self._platform
        if platform.is_tensor(state):
            return self._add_tensor(name, state, id(state))
        if isinstance(state, _PLAIN):
            return {"value": state}
        if isinstance(state, platform.Module):
            return self._add_module(name, path, state)
        if isinstance(state, dict):
            if path not in self.objects and _has_not_stepped(state):
                self.unstepped.append(name)
            return {"items": [[_key(name, key), self._inner(name, path, key, value)] for key, value in state.items()]}
        if isinstance(state, (list, tuple)):
            kind = "list" if isinstance(state, list) else "tuple"
            return {kind: [self._inner(name, path, index, value) for index, value in enumerate(state)]}
        if hasattr(state, "state_dict") and hasattr(state, "load_state_dict"):
            self.objects[path] = state
            return self._add(name, path, self._completed(name, state))
        msg = (
            f"save: {name or 'the state'} is a {type(state).__name__}; a state is made of modules, tensors, numbers, "
            "strings, dictionaries, lists, and objects with state_dict and load_state_dict"
        )
        raise CheckpointError(msg)

    def _inner(self, name: str, path: Path, key: Any, value: Any) -> Any:
        return self._add(_join(name, key), (*path, key), value)

    def _completed(self, name: str, owner: Any) -> Any:
        """Return the state of ``owner``, completed from the checkpoint for parameters that have no state yet."""
        state = owner.state_dict()
        if not hasattr(owner, "param_groups") or not isinstance(state, dict) or not _has_not_stepped(state):
            return state
        entries: dict[int, dict[str, Any]] = {}
        parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            start = f"{_join(name, 'state')}.{index}."
            for saved, entry in self._saved.items():
                if saved.startswith(start):
                    entries.setdefault(index, {})[saved.removeprefix(start)] = self._empty(parameter, entry)
        return {**state, "state": entries}

    def _empty(self, parameter: Any, entry: Entry) -> Any:
        """Return zeros for ``entry``: in the layout of ``parameter`` if it has its shape, else a plain tensor."""
        platform = self._platform
        dtype = platform.str_to_dtype(entry.dtype_name)
        if entry.shape != tuple(parameter.shape) or not hasattr(parameter, "full_tensor"):
            return platform.zeros(entry.shape, dtype=dtype)
        return platform.wrap(platform.zeros(parameter.local_shape, dtype=dtype), parameter.layout)


def merge(own: Any, saved: Any, tensors: Mapping[str, Any]) -> Any:
    """Return a state: ``tensors`` where the tree ``own`` has them, and the plain values of the tree ``saved``.

    Either tree may be None. Tensors that only ``saved`` has were renamed, and are left out.
    """
    kind, content = _node(own)
    if kind == "tensor":
        return tensors[content]
    saved_kind, saved_content = _node(saved) if saved is not None else (kind, content)
    if saved_kind == "value":
        return saved_content
    if saved_kind == "items":
        mine = dict(content) if kind == "items" else {}
        theirs = dict(saved_content)
        keys = dict.fromkeys([*theirs, *(key for key, tree in mine.items() if _has_tensors(tree))])
        kept = [key for key in keys if key in mine or _node(theirs[key])[0] != "tensor"]
        return {key: merge(mine.get(key), theirs.get(key), tensors) for key in kept}
    if saved_kind == "tensor":
        return None
    own_trees = content if kind == saved_kind and len(content) == len(saved_content) else [None] * len(saved_content)
    values = [merge(tree, other, tensors) for tree, other in zip(own_trees, saved_content, strict=True)]
    return values if saved_kind == "list" else tuple(values)


def _node(tree: Any) -> tuple[str, Any]:
    """Return kind and content of a tree."""
    return next(iter(tree.items())) if tree is not None else ("value", None)


def _has_tensors(tree: Any) -> bool:
    kind, content = _node(tree)
    if kind in {"tensor", "value"}:
        return kind == "tensor"
    return any(_has_tensors(inner) for inner in (dict(content).values() if kind == "items" else content))


def subtree(tree: Any, path: Path) -> Any:
    """Return the part of ``tree`` at ``path``, or the part of the same name if the keys differ; None without one."""
    exact = tree
    for key in path:
        exact = dict(_pairs(exact)).get(key)
    if exact is not None:
        return exact
    return _named_subtree(tree, name_of(path)) if name_of(path) else None


def _named_subtree(tree: Any, name: str) -> Any:
    """Return the part of ``tree`` with the name of a path, whose keys may contain dots; None if there is none."""
    if not name:
        return tree
    for key, value in _pairs(tree):
        if name == str(key) or name.startswith(f"{key}."):
            return _named_subtree(value, name.removeprefix(str(key)).removeprefix("."))
    return None


def _pairs(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Return pairs of key (or index) and content of a tree; no pairs for a tensor or a plain value."""
    kind, content = _node(tree)
    return content if kind == "items" else enumerate(content) if kind in {"list", "tuple"} else ()


def name_of(path: Path) -> str:
    """Return the name of what is at ``path``: its segments joined by dots."""
    name = ""
    for key in path:
        name = _join(name, key)
    return name


def platform_of_state(state: Any) -> Platform:
    """Return the platform of the first object of a framework in ``state``, or the current one if there is none."""
    waiting = [state]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, (dict, list, tuple)):
            waiting += value.values() if isinstance(value, dict) else value
            continue
        try:
            return platform_of(value)
        except TypeError:
            continue
    return current_platform()


def _has_not_stepped(state: dict[Any, Any]) -> bool:
    """Return whether ``state`` is that of an optimizer, without state for any parameter."""
    parts = state.get("state")
    return isinstance(parts, dict) and not parts and "param_groups" in state


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _key(name: str, key: Any) -> Any:
    if isinstance(key, (str, int)):
        return key
    msg = f"save: {name or 'the state'} has the key {key!r}; keys are strings or integers"
    raise CheckpointError(msg)

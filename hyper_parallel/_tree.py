"""Functions on nested containers (trees): list the leaves, map over them, rebuild a container.

A tree is a leaf or a container of trees. Callers choose which types are containers: :data:`SEQUENCES` for the arguments
of an operator, :data:`CONTAINERS` for users' inputs and outputs. A rebuilt container has the type of the original, such
as a named tuple, ``torch.Size`` or a user's own mapping.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

__all__ = [
    "CONTAINERS",
    "SEQUENCES",
    "as_list",
    "at_path",
    "leaves",
    "named_leaves",
    "paths",
    "rebuild",
    "tree_map",
    "tree_map_named",
    "unflatten",
]

Types = tuple[type, ...]
Path = tuple[Any, ...]

SEQUENCES: Types = (list, tuple)
CONTAINERS: Types = (list, tuple, Mapping)


def as_list(value: Any) -> list[Any]:
    """Return the items of a list or tuple, such as the outputs of a function; anything else as the only item."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def leaves(tree: Any, containers: Types = SEQUENCES) -> list[Any]:
    """Return the leaves of ``tree``, in order; a mapping's leaves in its order of iteration (keys are not sorted)."""
    collected: list[Any] = []
    if isinstance(tree, containers):
        _collect(tree, containers, collected.append)
    else:
        collected.append(tree)
    return collected


def _collect(tree: Any, containers: Types, add: Callable[[Any], None]) -> None:
    for item in tree.values() if isinstance(tree, Mapping) else tree:
        if isinstance(item, containers):
            _collect(item, containers, add)
        else:
            add(item)


def paths(tree: Any, containers: Types = SEQUENCES) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path: the indices and keys that lead to it from the root."""
    if isinstance(tree, containers):
        for key, item in _items(tree):
            for path, leaf in paths(item, containers):
                yield (key, *path), leaf
    else:
        yield (), tree


def at_path(tree: Any, path: Iterable[Any]) -> Any:
    """Return the value to which ``path`` leads from ``tree``."""
    for key in path:
        tree = tree[key]
    return tree


def named_leaves(name: str, tree: Any, containers: Types = SEQUENCES) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with the expression that reads it from a variable ``name``, such as ``batch['ids'][0]``."""
    for path, leaf in paths(tree, containers):
        yield name + "".join(f"[{key!r}]" for key in path), leaf


def tree_map(fn: Callable[[Any], Any], tree: Any, containers: Types = SEQUENCES) -> Any:
    """Return ``tree`` with ``fn(leaf)`` instead of every leaf."""
    if not isinstance(tree, containers):
        return fn(tree)
    items = [(key, tree_map(fn, item, containers)) for key, item in _items(tree)]
    return rebuild(tree, dict(items) if isinstance(tree, Mapping) else [item for _, item in items])


def _items(tree: Any) -> Iterable[tuple[Any, Any]]:
    return tree.items() if isinstance(tree, Mapping) else enumerate(tree)


def tree_map_named(fn: Callable[[str, Any], Any], name: str, tree: Any, containers: Types = SEQUENCES) -> Any:
    """Return ``tree`` with ``fn(leaf_name, leaf)`` instead of every leaf; names are those of :func:`named_leaves`."""
    return unflatten(tree, [fn(*leaf) for leaf in named_leaves(name, tree, containers)], containers)


def unflatten(tree: Any, new_leaves: Iterable[Any], containers: Types = SEQUENCES) -> Any:
    """Return ``tree`` with ``new_leaves`` instead of its own, in the order of :func:`leaves`."""
    remaining = iter(new_leaves)
    return tree_map(lambda _: next(remaining), tree, containers)


def rebuild(like: Any, items: Any) -> Any:
    """Return a container of the type of ``like``.

    Args:
        like: a list, tuple, named tuple or mapping.
        items: items of the new container, a list, or a dict with the keys of ``like``.
    """
    container_type = type(like)
    if container_type is list or container_type is dict:
        return items
    if container_type is tuple:
        return tuple(items)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return container_type(*items)
    if isinstance(like, MutableMapping):
        mapping = copy.copy(like)  # keeps a default factory, and the order of a mapping that sorts its keys itself
        for key, item in items.items():
            mapping[key] = item
        return mapping
    return container_type(items)

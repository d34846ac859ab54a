"""Paths of parameters and modules: patterns that name them, and parameters that are tied under several paths."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.modules import ModulesFacet

__all__ = [
    "MADE_BY_FULLY_SHARD", "MODULE_PATH", "TiedParameters", "describe_nearest", "module_label", "note_replacement",
    "owners_by_parameter", "path_matches", "replacing_parameters", "untying_problems",
]  # fmt: skip

MODULE_PATH = "_hyper_parallel_path"
"""Attribute of a module: its path from the outermost module that was parallelized."""
MADE_BY_FULLY_SHARD = "_hyper_parallel_made_by_fully_shard"
"""Attribute of parameters that ``fully_shard`` has made; they keep no reference to the originals, which would prevent
swaps.
"""
_FAMILY = "_hyper_parallel_family"

Slot = tuple[str, Any, str]
"""Path, owning module and attribute name of a parameter."""


def owners_by_parameter(platform: ModulesFacet, root: Any) -> dict[int, list[Slot]]:
    """Return every (path, owning module, attribute name) of each parameter under ``root``, by the parameter's id."""
    owners: dict[int, list[Slot]] = {}
    for path, module in platform.get_cells_and_names(root):
        for name, value in platform.direct_parameters(module).items():
            owners.setdefault(id(value), []).append((f"{path}.{name}" if path else name, module, name))
    return owners


class TiedParameters:
    """Keeps parameters tied while they are replaced one path at a time.

    Args:
        platform: the framework of the module.
        root: module whose parameters are examined; a parameter that is one object under several paths is tied.
    """

    def __init__(self, platform: ModulesFacet, root: Any) -> None:
        self._platform = platform
        self._groups = [
            (slots, self._parameter(slots[0]))
            for slots in owners_by_parameter(platform, root).values()
            if len(slots) > 1
        ]

    def _parameter(self, slot: Slot) -> Any:
        _, module, name = slot
        return self._platform.direct_parameters(module)[name]

    def restore(self) -> None:
        """Set a tied parameter's replacement under its other paths, too."""
        self._groups = [(slots, self._share_replacement(slots, shared)) for slots, shared in self._groups]

    def _share_replacement(self, slots: list[Slot], shared: Any) -> Any:
        new = next((parameter for parameter in map(self._parameter, slots) if parameter is not shared), None)
        if new is None:
            return shared
        for _, module, name in slots:
            self._platform.set_parameter(module, name, new)
            note_replacement(shared, new, module, name)
        return new


class _Family:
    """A parameter and its replacements, with the modules that hold them, referenced weakly. Pickled as an empty set."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str], ref[Any]] = {}

    def __reduce__(self) -> Any:
        """Pickle without the modules."""
        return set, ()

    def add(self, owner: Any, name: str) -> None:
        """Note that ``owner`` has a parameter of this family."""
        self._slots[id(owner), name] = ref(owner)

    def left_behind(self, platform: ModulesFacet, parameter: Any, inside: Container[int]) -> tuple[Any, str] | None:
        """Return a module that would keep a parameter tied to ``parameter``, and its name there; or None."""
        for (_, name), slot in self._slots.items():
            owner = slot()
            current = None if owner is None else platform.direct_parameters(owner).get(name)
            is_missed = current is not parameter or id(owner) not in inside
            if getattr(current, _FAMILY, None) is self and is_missed:
                return owner, name
        return None


def note_replacement(old: Any, new: Any, owner: Any, name: str) -> None:
    """Note that ``new`` replaced ``old``, parameter ``name`` of ``owner``, to find others that are tied to ``old``."""
    family = getattr(old, _FAMILY, None)
    if not isinstance(family, _Family):
        family = _Family()
        setattr(old, _FAMILY, family)
    setattr(new, _FAMILY, family)
    family.add(owner, name)


def untying_problems(platform: ModulesFacet, root: Any, replaced: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield a description of each parameter that would no longer be tied to one that an earlier call has placed.

    Args:
        platform: the framework of the module.
        root: the module whose parameters are to be replaced.
        replaced: these parameters, by path.
    """
    inside = {id(module) for _, module in platform.get_cells_and_names(root)}
    checked: set[int] = set()
    for path, parameter in replaced:
        family = getattr(parameter, _FAMILY, None)
        if id(parameter) in checked or not isinstance(family, _Family):
            continue
        checked.add(id(parameter))
        if family.left_behind(platform, parameter, inside) is None:
            continue
        gc.collect()  # modules without references do not count; collect them, so that all ranks see the same modules
        left = family.left_behind(platform, parameter, inside)
        if left is not None:
            owner, name = left
            yield (
                f"{path} is tied to the {name} of {module_label(owner)}, which an earlier call has placed and this "
                "call would not replace; give both modules their styles in one call, or give each module its own "
                "parameter before the first call"
            )


def module_label(module: Any) -> str:
    """Return the path and type of a module, ``layers.0.fc1 (Linear)``, or the type alone if the path is unknown."""
    path = module.__dict__.get(MODULE_PATH)
    type_name = type(module).__name__
    return f"{path} ({type_name})" if path else type_name


@contextmanager
def replacing_parameters(platform: ModulesFacet, root: Any) -> Iterator[TiedParameters]:
    """Replace parameters under ``root`` in the block; modules that hold them in containers get the new ones, too.

    A parameter without references outside of its modules is freed as soon as it is replaced, so memory never holds both
    the complete model and all of its shards.

    Args:
        platform: the framework of the module.
        root: module whose parameters are replaced.

    Yields:
        the tied parameters of ``root``.
    """
    slots = [slot for group in owners_by_parameter(platform, root).values() for slot in group]
    before = [(module, name, ref(platform.direct_parameters(module)[name])) for _, module, name in slots]
    try:
        yield TiedParameters(platform, root)
    finally:
        pairs = ((old(), platform.direct_parameters(module).get(name)) for module, name, old in before)
        replaced = [(old, new) for old, new in pairs if old is not None and new is not None and new is not old]
        platform.parameters_replaced(root, replaced)


def path_matches(pattern: str, path: str) -> bool:
    """Return True if ``pattern`` names ``path``; they are compared segment by segment, and a segment may be a glob.

    The pattern ``""`` names the module itself, which no glob does.
    """
    if not pattern or not path:
        return pattern == path
    tokens, parts = pattern.split("."), path.split(".")
    return len(tokens) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(tokens, parts, strict=True)
    )


def describe_nearest(pattern: str, paths: Sequence[str]) -> str:
    """Return the children of the deepest module that a prefix of ``pattern`` matches, for an error message."""
    tokens = pattern.split(".")
    heads = (".".join(tokens[:depth]) for depth in reversed(range(len(tokens))))
    parent = next(path for head in heads for path in paths if path_matches(head, path))
    children = [path.rpartition(".")[2] for path in paths if path and path.rpartition(".")[0] == parent]
    return f"children of {parent or 'the module'}: {', '.join(children) or 'none'}"

"""Paths of parameters and modules: patterns that name them, and parameters that are tied under several paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.modules import ModulesFacet

__all__ = ["TiedParameters", "describe_nearest", "owners_by_parameter", "path_matches", "replacing_parameters"]

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
        root: module whose parameters are examined: those that are one object under several paths are tied.
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
        """After a tied parameter was replaced under one path, set the replacement under its other paths too."""
        self._groups = [(slots, self._share_replacement(slots, shared)) for slots, shared in self._groups]

    def _share_replacement(self, slots: list[Slot], shared: Any) -> Any:
        new = next((parameter for parameter in map(self._parameter, slots) if parameter is not shared), None)
        if new is None:
            return shared
        for _, module, name in slots:
            self._platform.set_parameter(module, name, new)
        return new


@contextmanager
def replacing_parameters(platform: ModulesFacet, root: Any) -> Iterator[TiedParameters]:
    """Let parameters under ``root`` be replaced inside; modules that hold them in containers too get the new ones.

    A parameter that only its modules hold is freed as soon as it is replaced, so memory never holds the whole model
    and all of its shards.

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
    """For an error message: return the children of the deepest module that a prefix of ``pattern`` matches."""
    tokens = pattern.split(".")
    heads = (".".join(tokens[:depth]) for depth in reversed(range(len(tokens))))
    parent = next(path for head in heads for path in paths if path_matches(head, path))
    children = [path.rpartition(".")[2] for path in paths if path and path.rpartition(".")[0] == parent]
    return f"children of {parent or 'the module'}: {', '.join(children) or 'none'}"

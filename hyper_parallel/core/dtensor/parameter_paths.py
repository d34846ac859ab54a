"""Tied parameters: one object under several paths stays one object when one of the paths gets a new one."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["TiedParameters", "describe_nearest", "owners_by_parameter", "path_matches"]

Slot = tuple[str, Any, str]


def owners_by_parameter(platform: Platform, root: Any) -> dict[int, list[Slot]]:
    """By identity of the parameter: every (path, owning module, attribute name) that holds it."""
    found: dict[int, list[Slot]] = {}
    for path, module in platform.get_cells_and_names(root):
        for name, value in platform.direct_parameters(module).items():
            found.setdefault(id(value), []).append((f"{path}.{name}" if path else name, module, name))
    return found


class TiedParameters:
    """The tied parameters under ``root``, as they are when this is made."""

    def __init__(self, platform: Platform, root: Any) -> None:
        self._platform = platform
        self._groups = [
            (slots, self._held(slots[0])) for slots in owners_by_parameter(platform, root).values() if len(slots) > 1
        ]

    def _held(self, slot: Slot) -> Any:
        _, module, name = slot
        return self._platform.direct_parameters(module)[name]

    def restore(self) -> None:
        """Where one path of a group has a new parameter, give it to the others."""
        self._groups = [(slots, self._spread(slots, shared)) for slots, shared in self._groups]

    def _spread(self, slots: list[Slot], shared: Any) -> Any:
        new = next((held for held in map(self._held, slots) if held is not shared), None)
        if new is None:
            return shared
        for _, module, name in slots:
            self._platform.set_parameter(module, name, new)
        return new


def path_matches(pattern: str, path: str) -> bool:
    """Whether ``pattern`` names ``path``: segment by segment, each of which may be a glob.

    ``""`` is the module itself, and no glob means it.
    """
    if not pattern or not path:
        return pattern == path
    wanted, parts = pattern.split("."), path.split(".")
    return len(wanted) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(wanted, parts, strict=True)
    )


def describe_nearest(pattern: str, paths: Sequence[str]) -> str:
    """What there is where a pattern that names nothing stops matching; at the latest that is the module itself."""
    tokens = pattern.split(".")
    heads = (".".join(tokens[:depth]) for depth in reversed(range(len(tokens))))
    parent = next(path for head in heads for path in paths if path_matches(head, path))
    children = [path.rpartition(".")[2] for path in paths if path and path.rpartition(".")[0] == parent]
    return f"children of {parent or 'the module'}: {', '.join(children) or 'none'}"

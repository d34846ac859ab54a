"""Dotted paths of modules and parameters, and the patterns that name them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

__all__ = ["fits", "nearest"]


def fits(pattern: str, path: str) -> bool:
    """Whether ``pattern`` names ``path``: segment by segment, each of which may be a glob.

    ``""`` is the module itself, and no glob means it.
    """
    if not pattern or not path:
        return pattern == path
    wanted, parts = pattern.split("."), path.split(".")
    return len(wanted) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(wanted, parts, strict=True)
    )


def nearest(pattern: str, paths: Sequence[str]) -> str:
    """What there is where a pattern that names nothing stops matching; at the latest that is the module itself."""
    tokens = pattern.split(".")
    heads = (".".join(tokens[:depth]) for depth in reversed(range(len(tokens))))
    parent = next(path for head in heads for path in paths if fits(head, path))
    children = [path.rpartition(".")[2] for path in paths if path and path.rpartition(".")[0] == parent]
    return f"children of {parent or 'the module'}: {', '.join(children) or 'none'}"

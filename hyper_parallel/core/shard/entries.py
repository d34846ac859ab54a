"""Placements that a user writes for nested values: which of them describe one tensor. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Placement

__all__ = ["is_entry", "is_one", "rebuilt"]


def is_entry(placements: Any) -> bool:
    """Whether these may be the placements of one tensor, in any spelling."""
    if isinstance(placements, (Layout, Placement)):
        return True
    return isinstance(placements, Sequence) and all(
        isinstance(one, (Placement, str)) or _names(one) for one in placements
    )


def is_one(placements: Any) -> bool:
    """Whether these can only be one tensor's placements: tuples of axis names alone may also be several tensors'."""
    if isinstance(placements, (Layout, Placement)):
        return True
    return is_entry(placements) and any(isinstance(one, (Placement, str)) for one in placements)


def _names(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(one, str) for one in value)


def rebuilt(like: Any, items: Any) -> Any:
    """``items`` in a container of the type of ``like``."""
    if type(like) in (dict, list):
        return items
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)

"""What the three Prepare… styles share: lists of layouts, matched with values one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.tensor_parallel.styles.boundary import check_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary

__all__ = ["Pair", "convert", "read_many", "read_named"]

Pair = tuple[Any, Any]
"""How a plain value is held, and how it is wanted; None leaves the value alone, or where it is."""


def read_many(layouts: Any, option: str, style: str) -> tuple[Any, ...] | None:
    """One spec per value; a single placement stands for one value."""
    if layouts is None:
        return None
    if isinstance(layouts, Placement):
        return (layouts,)
    if not isinstance(layouts, (list, tuple)):
        msg = f"{style}: {option} must be a placement or a tuple with one layout (or None) per value, got {layouts!r}"
        raise TypeError(msg)
    return tuple(
        None if one is None else check_spec(one, f"{option}[{index}]", style) for index, one in enumerate(layouts)
    )


def read_named(layouts: Mapping[str, Any] | None, option: str, style: str) -> dict[str, Any]:
    """One spec per keyword."""
    return {
        name: None if one is None else check_spec(one, f"{option}[{name!r}]", style)
        for name, one in (layouts or {}).items()
    }


def convert(edge: Boundary, value: Any, pair: Pair, argument: str, *, use_local: bool) -> Any:
    """``value`` as a DTensor in the wanted layout, or this rank's piece of it."""
    source, wanted = pair
    if source is None:
        return value
    entered = edge.enter(value, source, argument)
    moved = entered if wanted is None else edge.move(entered, wanted, argument)
    return moved.to_local() if use_local else moved

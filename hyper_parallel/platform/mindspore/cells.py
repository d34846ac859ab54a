"""The tree of cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["walk"]


def walk(cell: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every cell with its path, depth first; shared cells once per path."""
    yield path, cell
    for name, child in cell._cells.items():  # noqa: SLF001
        if child is not None:
            yield from walk(child, f"{path}.{name}" if path else name)

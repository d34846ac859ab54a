"""Replaces functions inside a block, and tells a replacement which file has called it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["LIBRARY", "called_from", "replaced"]

LIBRARY = str(Path(__file__).parents[3])
"""The folder of this library."""


@contextmanager
def replaced(attributes: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes inside the block.

    Args:
        attributes: the replacements by owner (a class or module that has the attribute itself) and name.
    """
    before = {(owner, name): vars(owner)[name] for owner, name in attributes}
    try:
        for (owner, name), value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


def called_from(*folders: str) -> bool:
    """Return whether the function that calls this one was itself called from a file in one of the folders."""
    return sys._getframe(2).f_code.co_filename.startswith(folders)  # noqa: SLF001 - the only way to find the caller

"""Remembers which entry of a plan made the last DTensor, for error messages about mixed tensors.

The note is in a context variable, so ranks and threads do not see each other's.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["last_style_output", "note_style_output"]

# The mesh of the style, as messages show it, and a clause that names the module and its entry in the plan.
_LAST: ContextVar[tuple[str, str]] = ContextVar("hyper_parallel_style_output", default=("", ""))


def note_style_output(note: tuple[str, str]) -> None:
    """Note that a style's module has returned a DTensor: ``repr`` of the mesh, and the clause that says so."""
    _LAST.set(note)


def last_style_output(mesh: DeviceMesh) -> str:
    """Return the clause of the last note, or ``""`` if there is none for ``mesh``."""
    shown, clause = _LAST.get()
    return clause if shown == repr(mesh) else ""

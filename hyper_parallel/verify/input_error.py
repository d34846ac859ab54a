"""The error of an input that cannot be verified."""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(ValueError):
    """The input cannot be verified: a wrong program, SPEC, PLAN, mesh, world size or fault."""

"""The interface to both frameworks, and the selection of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import names_from_elsewhere

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every misspelt name
    __getattr__ = names_from_elsewhere(__name__)

"""Rules by family, one file each. Importing a family registers its rules."""

from __future__ import annotations

import importlib
import pkgutil

__all__ = ["load"]


def load() -> None:
    """Import every module of this package, which registers its rules."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

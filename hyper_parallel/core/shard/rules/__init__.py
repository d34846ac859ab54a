"""Sharding rules by family, one file each. Importing a family registers its rules.

Docstrings of rules name the dims of operands and outputs by letters, as einsum does: ``…k, nk -> …n``. ``…`` stands for
any leading or further dims. Dims in brackets must not be sharded; all others may be.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__ = ["load"]


def load() -> None:
    """Import every module of this package, which registers its rules."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

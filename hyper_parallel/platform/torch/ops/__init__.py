"""PyTorch's names for the canonical operators, one file per family; importing this package registers all of them."""

from __future__ import annotations

import importlib
import pkgutil

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")

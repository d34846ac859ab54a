"""The version of this library."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

__all__ = ["__version__"]


def _installed_version() -> str | None:
    try:
        return metadata.version("hyper-parallel")
    except metadata.PackageNotFoundError:
        return None


def _checkout_version(project: Path) -> str:
    """Return the version in the project's settings, ``unknown`` where there are none."""
    text = project.read_text(encoding="utf-8") if project.exists() else ""
    line = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    return line[1] if line else "unknown"


__version__ = _installed_version() or _checkout_version(Path(__file__).parents[1] / "pyproject.toml")
"""The version of the installed package, or else that of the checkout."""

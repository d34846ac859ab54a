"""Decides whether a file belongs to an installed package; module copies of ranks, pickles and tracebacks use this rule.

A file is installed if it is in the standard library, or in a folder named ``site-packages`` or ``dist-packages``. The
same holds for files that an installer has recorded in a folder on ``sys.path`` (``pip install --target``), and for
files of a framework, even if it was built in a checkout. All other files belong to the user.
"""

from __future__ import annotations

import csv
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hyper_parallel._caches import register

__all__ = ["FRAMEWORKS", "installed_package", "is_installed", "package_place"]

FRAMEWORKS = ("torch", "torch_npu", "mindspore")
"""Top-level names of the frameworks, which are never a user's module."""

_OWN_INTERPRETER = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, key=len, reverse=True)
)
_SITES = {"site-packages", "dist-packages"}
_MODULES = (".py", ".so")


def is_installed(path: str) -> bool:
    """Whether ``path``, a file or a folder of modules, belongs to an installed package."""
    return package_place(path) is not None


def installed_package(path: str) -> str | None:
    """Return the top-level package or module of an installed file (``"torch"``), or None for a user's file."""
    place = package_place(path)
    return None if place is None else place.rpartition("/")[2].partition(".")[0]


def package_place(path: str) -> str | None:
    """Return the folder or file of the top-level package or module of an installed file, or None for a user's file."""
    modules = [sys.modules.get(name) for name in FRAMEWORKS]
    frameworks = tuple(folder for module in modules for folder in getattr(module, "__path__", ()))
    return _place(path.replace("\\", "/"), tuple(sys.path), frameworks)


@functools.lru_cache(maxsize=1 << 14)
def _place(path: str, search: tuple[str, ...], frameworks: tuple[str, ...]) -> str | None:
    parts = path.split("/")
    sites = [place for place, part in enumerate(parts[:-1]) if part in _SITES]
    if sites:
        return "/".join(parts[: sites[-1] + 2])
    for folder in _OWN_INTERPRETER:
        inner = _inside(path, folder)
        if inner:
            return f"{folder}/{inner[0]}"
    for folder in frameworks:
        if _inside(path, folder) is not None:
            return folder
    for folder in search:
        inner = _inside(path, folder) if folder else None
        if inner and "/".join(inner) in _recorded(str(Path(folder).resolve())):
            return f"{folder}/{inner[0]}"
    return None


def _inside(path: str, folder: str) -> tuple[str, ...] | None:
    """Return the parts of ``path`` below ``folder``, with or without resolving links; None if it is outside."""
    for place, root in ((Path(path), Path(folder)), (Path(path).resolve(), Path(folder).resolve())):
        if place.is_relative_to(root):
            return place.relative_to(root).parts
    return None


@functools.lru_cache(maxsize=64)
def _recorded(folder: str) -> frozenset[str]:
    """Return the files of all packages that an installer put into ``folder``, and their folders."""
    return frozenset(part for file in _files(Path(folder)) for part in (file, *map(str, Path(file).parents)))


def _files(folder: Path) -> Iterator[str]:
    for record in sorted(folder.glob("*.dist-info/RECORD")):
        with record.open(newline="", encoding="utf-8") as lines:
            yield from (os.path.normpath(row[0]) for row in csv.reader(lines) if row and row[0].endswith(_MODULES))


register("packages of files", _place)
register("records of installers", _recorded)

"""Determines the framework of a program from the imports of its file, without running it."""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from hyper_parallel.platform.select import (
    ENVIRONMENT_VARIABLE,
    FRAMEWORKS,
    default_framework,
    framework_for,
    installed_frameworks,
)
from hyper_parallel.transport.installed import is_installed
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.advice import advice_on_launches
from hyper_parallel.verify.program.program import Program

__all__ = ["imported_frameworks", "imported_packages", "other_framework", "program_framework"]

_STACKS = {
    "torch": {
        "accelerate", "deepspeed", "lightning", "megatron", "peft", "pytorch_lightning", "torchtitan", "transformers",
        "trl",
    },
    "mindspore": {"mindformers", "mindnlp", "mindone"},
}  # fmt: skip
"""Packages that use one framework for training."""


def program_framework(program: Program) -> str:
    """Return the framework that a program's file imports, or the framework of the function's module.

    Raises:
        InputError: (a ValueError) the file imports both frameworks or none, both are installed, and the environment
            does not choose one. If the file imports none because it starts ranks itself, the message says what to
            verify instead.
        MissingFrameworkError: (an ImportError) neither framework is installed.
    """
    if callable(program.function):
        return framework_for(program.function)
    named = imported_frameworks(Path(program.path), program.folder)
    if len(named) == 1:
        return named[0]
    if len(installed_frameworks()) < len(FRAMEWORKS) or os.environ.get(ENVIRONMENT_VARIABLE):
        return default_framework()
    launches = "" if named else advice_on_launches(program)
    if launches:
        raise InputError(launches)
    imports = "imports both PyTorch and MindSpore" if named else "imports neither PyTorch nor MindSpore"
    msg = f"FILE {program.name!r} {imports}; add --platform torch or --platform mindspore"
    raise InputError(msg)


def other_framework(program: Program, platform: str) -> str:
    """Return the framework that a program imports if it imports only one, and not ``platform``; otherwise empty."""
    named = [] if callable(program.function) else imported_frameworks(Path(program.path), program.folder)
    return named[0] if len(named) == 1 and named != [platform] else ""


def imported_frameworks(path: Path, folder: Path | None = None) -> list[str]:
    """Return the frameworks that a file imports, or if there are none, those that its modules in ``folder`` import.

    If a file imports neither framework, a library that trains with one framework counts as importing it.

    Args:
        path: path of a file that compiles.
        folder: folder of the other modules that the file imports; by default that of the file.
    """
    everything: set[str] = set()
    for modules in _layers(path, folder):
        packages = {module.partition(".")[0] for module in modules}
        named = [name for name in FRAMEWORKS if name in packages]
        if named:
            return named
        everything |= packages
    return [name for name in FRAMEWORKS if everything & _STACKS[name]]


def imported_packages(path: Path, folder: Path | None = None) -> list[str]:
    """Return the modules of installed packages, and the names in them, that a file or its modules in ``folder`` import.

    Args:
        path: path of a file that compiles.
        folder: folder of the other modules that the file imports; by default that of the file.
    """
    names = {module for modules in _layers(path, folder) for module in modules if module}
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    installed = {name for name in packages if not _files(folder or path.parent, name) and _found(name)}
    return sorted(name for name in names if name.partition(".")[0] in installed)


def _found(name: str) -> bool:
    """Return whether an installed package has this name, in any location; nothing is imported."""
    spec = importlib.machinery.PathFinder.find_spec(name) if name else None
    return spec is not None and spec.origin is not None and is_installed(spec.origin)


def _layers(path: Path, folder: Path | None) -> Iterator[list[str]]:
    """Yield the modules that a file imports, then those that its modules in ``folder`` import, and so on."""
    seen, waiting = {path}, [path]
    while waiting:
        modules = [module for file in waiting for module in _imports(file)]
        yield modules
        waiting = list(
            dict.fromkeys(file for module in modules for file in _files(folder or path.parent, module) - seen)
        )
        seen.update(waiting)


def _imports(path: Path) -> Iterator[str]:
    """Yield the names of all modules that a file imports, without the dots of relative imports."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the file does not compile; running the program reports this
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names)


def _files(folder: Path, module: str) -> set[Path]:
    """Return the files of a module and of its packages that are in the folder."""
    parts = module.split(".")
    stems = [folder.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    return {file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()}

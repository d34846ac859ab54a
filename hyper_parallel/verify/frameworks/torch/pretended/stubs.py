"""Stubs for kernel packages that are not installed: a program can import them, but a call of anything in them fails.

Installed packages are not replaced. If the import is inside a ``try`` that catches ImportError, or the program only
searches for the package, the package is not found, so that the program uses its own fallback.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hyper_parallel.verify.frameworks.torch.pretended.device import lacking

__all__ = ["STUBBED", "SWITCHES", "offer_stubs"]

SWITCHES = {
    "triton": "choose the implementation in PyTorch, such as use_liger_kernel=False in transformers",
    "flash_attn": 'attn_implementation="sdpa" in transformers, --attention-backend unfused in Megatron',
    "transformer_engine": "--transformer-impl local in Megatron, get_gpt_layer_local_spec() in megatron.core",
    "apex": "torch.optim for its optimizers; --no-gradient-accumulation-fusion and --no-persist-layer-norm in Megatron",
}
"""Kernel packages, each with the option with which training stacks avoid the package."""

STUBBED: dict[str, str] = {}
"""Packages that were replaced by stubs, with file and line of their first import."""

_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def offer_stubs() -> None:
    """Offer stubs for packages that are not installed to imports of this process."""
    sys.meta_path.append(_Finder())


class _Stub(ModuleType):
    """Module of a package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _Name:
    """A function, class or constant of a package that is not installed.

    Args:
        path: qualified name, including the package.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        """Return a placeholder for the attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator, whose result raises an error when called; any other call raises the error now."""
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Name):
            return _Name(f"{self._path} of {getattr(args[0], '__qualname__', args[0])}")
        if self._path.rpartition(".")[2] in ("jit", "autotune", "heuristics", "Config") and not _runs_kernel(args):
            return _Name(self._path)
        raise self._lacking()

    def _lacking(self) -> Exception:
        return lacking(self._path, SWITCHES[self._path.partition(".")[0]])

    def __getitem__(self, key: Any) -> Any:
        """Return the placeholder, which stands for a kernel with a grid or for a subscripted type."""
        del key
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """Act as a base class that can be subclassed but not instantiated."""
        del bases

        def __init__(*_: Any, **__: Any) -> None:  # noqa: N807 - of the class below
            raise self._lacking()

        return (type(self._path.rpartition(".")[2], (), {"__init__": __init__}),)


def _runs_kernel(args: Sequence[Any]) -> bool:
    import torch

    return any(isinstance(value, torch.Tensor) for value in args)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for an import that requires a package which is not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the specification of a stub for a package or for a module in a stub."""
        del path, target
        package = name.partition(".")[0]
        if package not in SWITCHES:
            return None
        if package in STUBBED:
            return ModuleSpec(name, self, is_package=True)
        site = _importing_site()
        if not site:
            return None
        STUBBED[package] = site
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stub."""
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub has no code."""


def _importing_site() -> str:
    """Return ``file:line`` of the running import if the program requires the package; otherwise an empty text."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - only the stack shows the importing line
    site = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and Path(file).parent.name != "importlib":
            kind = _imports(file).get(frame.f_lineno)
            if kind == "guarded" or (kind is None and not site):
                return ""
            site = site or f"{file}:{frame.f_lineno}"
        elif file == importlib.util.__file__:
            return ""  # the program only searches for the package
        frame = frame.f_back
    return site


@functools.lru_cache(maxsize=256)
def _imports(file: str) -> dict[int, str]:
    """Return for each line with an import ``guarded`` if a ``try`` catches its ImportError, else ``plain``."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[int, str] = {}

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _imports_by_call(node):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)  # type: ignore[attr-defined]
            found.update(dict.fromkeys(lines, "guarded" if guarded else "plain"))
        if isinstance(node, ast.Try):
            caught = guarded or any(map(_catches, node.handlers))
            for inside in node.body:
                visit(inside, caught)
            for outside in (*node.handlers, *node.orelse, *node.finalbody):
                visit(outside, guarded)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, guarded and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(tree, False)
    return found


def _imports_by_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind).rpartition(".")[2] in _CAUGHT for kind in types)

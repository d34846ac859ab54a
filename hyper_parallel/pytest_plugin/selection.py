"""Select tests by framework, and count the deselected ones.

- A test with ``@pytest.mark.platforms("torch")`` runs only if torch is selected. If the mark names several frameworks,
  one of them must be selected, or all with ``together=True`` (for tests that compare frameworks with each other).
- A test with the fixture ``platform_name`` runs once per selected framework that its mark allows.
- A test with neither always runs, and must not need a framework.
- ``HP_TEST_TOGETHER=1`` leaves only the tests marked ``together=True``.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest

__all__ = ["PLATFORMS", "REMOVED", "allowed", "allows", "module_mark", "selected", "split"]

PLATFORMS = ("torch", "mindspore")
REMOVED = pytest.StashKey[Counter[str]]()


def selected(config: pytest.Config) -> tuple[str, ...]:
    """Return the frameworks to test on; a requested framework that is not installed is an error, not a skip."""
    option = config.getoption("hp_platforms")
    source, asked = ("--hp-platforms", option) if option else ("HP_TEST_PLATFORMS", os.environ.get("HP_TEST_PLATFORMS"))
    if not asked:
        return tuple(name for name in PLATFORMS if importlib.util.find_spec(name))
    names = tuple(name.strip() for name in asked.split(","))
    if unknown := [name for name in names if name not in PLATFORMS]:
        msg = f"{source} names {unknown}; known are {', '.join(PLATFORMS)}"
        raise pytest.UsageError(msg)
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        msg = f"{source} asks for {missing}, which is not installed here"
        raise pytest.UsageError(msg)
    return names


def allows(mark: pytest.Mark | None, names: tuple[str, ...]) -> bool:
    """Whether a test with this ``platforms`` mark can run on these frameworks."""
    if mark is None:
        return True
    if not mark.args or set(mark.args) - set(PLATFORMS):
        msg = f"mark platforms{mark.args}: known are {', '.join(PLATFORMS)}"
        raise pytest.UsageError(msg)
    return (all if _together(mark) else any)(name in names for name in mark.args)


def allowed(mark: pytest.Mark | None, names: tuple[str, ...]) -> list[str]:
    """Return the selected frameworks on which a test with this mark runs."""
    return [name for name in names if mark is None or name in mark.args]


def module_mark(path: Path) -> pytest.Mark | None:
    """Read the ``platforms`` mark of a test module without importing it, since its imports may need the framework."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):  # pytest itself reports the file
        return None
    for node in body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == "pytestmark" for target in node.targets):
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "platforms":
                    return _literal_mark(call)
    return None


def _literal_mark(call: ast.Call) -> pytest.Mark | None:
    try:
        together = any(word.arg == "together" and ast.literal_eval(word.value) for word in call.keywords)
        names = tuple(ast.literal_eval(argument) for argument in call.args)
    except ValueError:  # computed names are known only after importing the module
        return None
    return pytest.mark.platforms(*names, together=together).mark


def split(config: pytest.Config, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split items into those that run and those that are deselected; count the latter."""
    names, kept, removed = selected(config), [], []
    only_together = bool(os.environ.get("HP_TEST_TOGETHER"))
    for item in items:
        mark = item.get_closest_marker("platforms")
        if allows(mark, names) and (_together(mark) or not only_together):
            kept.append(item)
        else:
            removed.append(item)
            config.stash[REMOVED][", ".join(mark.args) if mark else "no framework"] += 1
    return kept, removed


def _together(mark: pytest.Mark | None) -> bool:
    """Whether a mark requires all its frameworks in one process."""
    return mark is not None and bool(mark.kwargs.get("together"))

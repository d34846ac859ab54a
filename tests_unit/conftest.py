"""Selects tests by framework: `HP_TEST_PLATFORMS=torch|mindspore|torch,mindspore`, by default what is installed.

- `@pytest.mark.platforms("torch")`: deselected where torch is not selected. Several names: any one is enough, or all
  of them with `together=True` (for tests that compare frameworks with each other).
- The fixture `platform_name`: the test runs once for each selected framework that its mark allows.
- Tests with neither run everywhere, and must not need a framework.
- `HP_TEST_TOGETHER=1` leaves only the tests marked `together=True`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest

PLATFORMS = ("torch", "mindspore")
REMOVED = pytest.StashKey[Counter]()


def selected() -> tuple[str, ...]:
    """Frameworks that this run is about; one that is asked for and missing is an error, never a skip."""
    asked = os.environ.get("HP_TEST_PLATFORMS")
    if not asked:
        return tuple(name for name in PLATFORMS if importlib.util.find_spec(name))
    names = tuple(name.strip() for name in asked.split(","))
    if unknown := [name for name in names if name not in PLATFORMS]:
        raise pytest.UsageError(f"HP_TEST_PLATFORMS names {unknown}; known are {', '.join(PLATFORMS)}")
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise pytest.UsageError(f"HP_TEST_PLATFORMS asks for {missing}, which is not installed here")
    return names


def together(mark: pytest.Mark | None) -> bool:
    """Tell whether a mark asks for all its frameworks in one process."""
    return mark is not None and bool(mark.kwargs.get("together"))


def allows(mark: pytest.Mark | None, names: tuple[str, ...]) -> bool:
    """Tell whether a `platforms` mark can be served by these frameworks."""
    if mark is None:
        return True
    if not mark.args or set(mark.args) - set(PLATFORMS):
        raise pytest.UsageError(f"mark platforms{mark.args}: known are {', '.join(PLATFORMS)}")
    return (all if mark.kwargs.get("together") else any)(name in names for name in mark.args)


def pytest_configure(config):
    """Refuse a wrong selection before anything is collected."""
    config.stash[REMOVED] = Counter()
    selected()


def module_mark(path: Path) -> pytest.Mark | None:
    """Read the `platforms` mark of a whole test module without importing it: its imports may need the framework."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(getattr(one, "id", None) == "pytestmark" for one in node.targets):
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "platforms":
                    together = any(word.arg == "together" and ast.literal_eval(word.value) for word in call.keywords)
                    names = tuple(ast.literal_eval(one) for one in call.args)
                    return pytest.mark.platforms(*names, together=together).mark
    return None


def pytest_ignore_collect(collection_path, config):
    """Leave out a module of frameworks that are not selected before it is imported, and count it."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    mark = module_mark(collection_path)
    if allows(mark, selected()):
        return None
    config.stash[REMOVED][f"{', '.join(mark.args)} (whole modules)"] += 1
    return True


def pytest_generate_tests(metafunc):
    """Run a test with the fixture `platform_name` once per selected framework that its mark allows."""
    if "platform_name" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("platforms")
        names = [name for name in selected() if mark is None or name in mark.args]
        metafunc.parametrize("platform_name", names, scope="session")


def pytest_collection_modifyitems(config, items):
    """Deselect what belongs to frameworks that are not selected, and count it."""
    names, kept, removed = selected(), [], []
    only_together = bool(os.environ.get("HP_TEST_TOGETHER"))
    for item in items:
        mark = item.get_closest_marker("platforms")
        wanted = allows(mark, names) and (together(mark) or not only_together)
        (kept if wanted else removed).append(item)
    for item in removed:
        mark = item.get_closest_marker("platforms")
        config.stash[REMOVED][", ".join(mark.args) if mark else "no framework"] += 1
    if removed:
        config.hook.pytest_deselected(items=removed)
        items[:] = kept


def pytest_terminal_summary(terminalreporter, config):
    """Print what was selected and what was left out: a small number of tests must not look like all of them."""
    terminalreporter.write_line(f"platforms: {', '.join(selected()) or 'none is installed'}")
    for names, count in sorted(config.stash[REMOVED].items()):
        terminalreporter.write_line(f"deselected: {count} {'of' if 'modules' in names else 'tests of'} {names}")

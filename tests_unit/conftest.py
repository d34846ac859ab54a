"""Selects tests by framework: `HP_TEST_PLATFORMS=torch|mindspore|torch,mindspore`, by default what is installed.

- `@pytest.mark.platforms("torch")`: deselected where torch is not selected. Several names: any one is enough, or all
  of them with `together=True` (for tests that compare frameworks with each other).
- The fixture `platform_name`: the test runs once for each selected framework that its mark allows.
- Tests with neither run everywhere, and must not need a framework.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

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


def pytest_generate_tests(metafunc):
    """Run a test with the fixture `platform_name` once per selected framework that its mark allows."""
    if "platform_name" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("platforms")
        names = [name for name in selected() if mark is None or name in mark.args]
        metafunc.parametrize("platform_name", names, scope="session")


def pytest_collection_modifyitems(config, items):
    """Deselect what belongs to frameworks that are not selected, and count it."""
    names, kept, removed = selected(), [], []
    for item in items:
        mark = item.get_closest_marker("platforms")
        (kept if allows(mark, names) else removed).append(item)
    for item in removed:
        config.stash[REMOVED][", ".join(item.get_closest_marker("platforms").args)] += 1
    if removed:
        config.hook.pytest_deselected(items=removed)
        items[:] = kept


def pytest_terminal_summary(terminalreporter, config):
    """Print what was selected and what was left out: a small number of tests must not look like all of them."""
    terminalreporter.write_line(f"platforms: {', '.join(selected()) or 'none is installed'}")
    for names, count in sorted(config.stash[REMOVED].items()):
        terminalreporter.write_line(f"deselected: {count} tests of {names}")

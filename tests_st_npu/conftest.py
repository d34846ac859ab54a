"""System tests select by framework exactly as the unit tests do: the same hooks, loaded from the same file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_FILE = Path(__file__).parents[1] / "tests_unit" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("hyper_parallel_test_selection", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
_SELECTION = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_SELECTION)

pytest_ignore_collect = _SELECTION.pytest_ignore_collect
pytest_configure = _SELECTION.pytest_configure
pytest_generate_tests = _SELECTION.pytest_generate_tests
pytest_collection_modifyitems = _SELECTION.pytest_collection_modifyitems
pytest_terminal_summary = _SELECTION.pytest_terminal_summary

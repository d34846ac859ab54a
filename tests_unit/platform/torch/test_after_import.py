"""Functions that are called once a module has been imported."""

from __future__ import annotations

import sys

import pytest

from hyper_parallel.platform.torch.after_import import after_import

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path of imports; what is imported from it is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = set(sys.modules), list(sys.meta_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.meta_path[:] = finders


def test_a_module_is_given_once_it_has_run(folder):
    """The function gets the module with all its names, at the first import and never again; others pass it by."""
    (folder / "late_module.py").write_text("first = 1\nimport late_other\nlast = 2\n")
    (folder / "late_other.py").write_text("")
    given = []
    after_import("late_module", lambda module: given.append((module.__name__, module.last)))
    import late_module
    import late_other

    assert given == [("late_module", 2)]
    after_import("late_module", given.append)
    assert given[1:] == [late_module]
    assert late_other.__name__ == "late_other"


def test_a_module_that_does_not_exist(folder):
    """A missing module stays a plain ModuleNotFoundError."""
    given = []
    after_import("late_missing", given.append)
    with pytest.raises(ModuleNotFoundError, match="late_missing"):
        import late_missing  # noqa: F401 - it does not exist
    assert not given
    assert folder.exists()

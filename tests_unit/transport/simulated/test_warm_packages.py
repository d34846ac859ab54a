"""A fork server imports the packages of a program, and leaves nothing of those that it could not import."""

import sys

import pytest

from hyper_parallel.transport.simulated.warm_packages import _import_all


def test_a_package_that_fails_leaves_no_parts(tmp_path, monkeypatch):
    """Parts without their package would break its import in the rank, which then raises the package's own error."""
    folder = tmp_path / "warm_and_broken"
    folder.mkdir()
    (folder / "__init__.py").write_text("from warm_and_broken import part\nraise RuntimeError('no rank here')\n")
    (folder / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    _import_all(["warm_and_broken.part", "json"])
    assert not [name for name in sys.modules if name.startswith("warm_and_broken")]
    with pytest.raises(RuntimeError, match="no rank here"):
        __import__("warm_and_broken")

"""A module to change, for the tests of source mutants."""

import importlib
import sys

import pytest

MODULE = """
from functools import cached_property
LIMIT = 3
def piece(n, ranks, rank, op="sum"):
    if n < 0:
        raise ValueError(f"{n} + 1")
    msg = "avg" + str(n + 1)
    return min(n, rank * -(-n // ranks)), op == "avg" and not msg
class Step:
    @cached_property
    def size(self) -> "max":
        return 7 if self else 8
    def messages(self):
        return list(zip([1], [2], strict=True))
    @staticmethod
    def word():
        return "sum"
    @property
    def on(self):
        return True
    def __repr__(self):
        return "a" + "b"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the test's own, as a file."""
    (tmp_path / "changed_in_place.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("changed_in_place")
    sys.modules.pop("changed_in_place")

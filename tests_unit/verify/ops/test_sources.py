"""Redistribution's own code changed in one place: what is changed, and that the check notices."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.dtensor.transition import plan
from hyper_parallel.verify.ops.sources import SOURCES, SourceMutant, applied, source_mutants
from hyper_parallel.verify.redistribution import first_wrong, least_work

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
    """A module of ours, as a file."""
    (tmp_path / "changed_in_place.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("changed_in_place")
    sys.modules.pop("changed_in_place")


def test_what_is_changed(module):
    """Expressions of functions slip; refusals, messages, texts, annotations and constants of the module do not."""
    found = source_mutants(module.__name__)
    kinds = [(one.kind, one.change.partition(":")[0]) for one in found]
    assert sorted(kinds) == sorted([
        ("another function", "line 8"), ("another operation", "line 8"), ("another operation", "line 8"),
        ("comparison turned", "line 8"), ("another reduction", "line 8"), ("and for or", "line 8"),
        ("condition negated", "line 12"), ("off by one", "line 12"), ("off by one", "line 12"),
        ("another reduction", "line 17"), ("constant turned", "line 20"),
    ])  # fmt: skip
    assert found[0].change.startswith("line 8: return min(n, rank")


@pytest.mark.parametrize(
    "kind, before, after",
    [
        ("another function", (1, False), (5, False)),
        ("and for or", (1, False), (1, False)),
        ("comparison turned", (1, False), (1, False)),
    ],
)
def test_functions_run_the_changed_code(module, kind, before, after):
    """Whoever holds the function runs it: it is the same object."""
    held = module.piece
    assert held(5, 5, 1) == before
    (mutant,) = [one for one in source_mutants(module.__name__) if one.kind == kind]
    assert applied(mutant)
    assert module.piece is held
    assert held(5, 5, 1) == after


def test_methods_and_properties_run_it_too(module):
    """Static methods, properties and cached ones are given the changed code; what changes nothing is told."""
    step = module.Step()
    for mutant in source_mutants(module.__name__):
        if mutant.change.startswith(("line 12", "line 17", "line 20")) and mutant.kind != "off by one":
            assert applied(mutant)
            line = mutant.change.partition(":")[0]
            got = {"line 12": lambda: step.size, "line 17": step.word, "line 20": lambda: step.on}[line]()
            assert got == {"line 12": 8, "line 17": "max", "line 20": False}[line]
    first = source_mutants(module.__name__)[0]
    none = SourceMutant(first.module, first.node, "", "", lambda _: None)
    assert applied(none)  # back to what it was
    assert step.on
    assert not applied(none)


@pytest.mark.platforms("torch")
def test_slips_in_redistribution_are_noticed(capsys, tmp_path):
    """The command changes the library in children; this process is as it was, and what survived is listed."""
    path = tmp_path / "sources.json"
    asked = ["verify", "mutants", "--source", "--each", "1", "--seed", "1", "--floor", "0", "--report", str(path)]
    assert main(asked) == 0
    said = json.loads(path.read_text())
    assert said["mutants"] == len(SOURCES)
    assert said["killed"] + said["survived"] + said["equivalent"] == len(SOURCES)
    assert said["killed"]
    assert first_wrong("torch", (2,)) == ""
    assert least_work((2,)) == (49, least_work((2,))[1])
    assert callable(plan)
    assert main(["verify", "mutants", "--source", "--op", "relu"]) == 2
    assert "--source changes the code of redistribution, which has none" in capsys.readouterr().err

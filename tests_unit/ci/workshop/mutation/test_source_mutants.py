"""Mutants of redistribution's own code: what is changed, and that the check notices."""

from __future__ import annotations

import pytest

from workshop.mutation.source_mutants import EQUIVALENT, SourceMutant, apply_mutant, source_mutants
from workshop.mutation.suite import checks


def test_what_is_changed(module):
    """Expressions in functions are changed; refusals, messages, texts, annotations and module constants are not."""
    mutants = source_mutants(module.__name__)
    kinds = [(mutant.kind, f"line {mutant.line}") for mutant in mutants]
    assert sorted(kinds) == sorted([
        ("another function", "line 8"), ("another operation", "line 8"), ("another operation", "line 8"),
        ("comparison turned", "line 8"), ("another reduction", "line 8"), ("and for or", "line 8"),
        ("condition negated", "line 12"), ("off by one", "line 12"), ("off by one", "line 12"),
        ("off by one", "line 14"), ("off by one", "line 14"),
        ("another reduction", "line 17"), ("constant turned", "line 20"),
    ])  # fmt: skip
    assert sorted({mutant.where for mutant in mutants}) == [
        "Step.messages",
        "Step.on",
        "Step.size",
        "Step.word",
        "piece",
    ]
    changes = {mutant.change for mutant in mutants}
    assert {"piece, line 8: op == 'avg' -> op != 'avg'", "Step.size, line 12: self -> not self"} <= changes
    assert "piece, line 8: min(n, rank * -(-n // ranks)) -> max(n, rank * -(-n // ranks))" in changes


@pytest.mark.parametrize(
    "kind, before, after",
    [
        ("another function", (1, False), (5, False)),
        ("and for or", (1, False), (1, False)),
        ("comparison turned", (1, False), (1, False)),
    ],
)
def test_functions_run_the_changed_code(module, kind, before, after):
    """Existing references to the function run the changed code, because the function object stays the same."""
    function = module.piece
    assert function(5, 5, 1) == before
    (mutant,) = [mutant for mutant in source_mutants(module.__name__) if mutant.kind == kind]
    assert apply_mutant(mutant)
    assert module.piece is function
    assert function(5, 5, 1) == after


def test_methods_and_properties_run_it_too(module):
    """Static methods, properties and cached properties run the changed code; an edit without effect is reported."""
    step = module.Step()
    for mutant in source_mutants(module.__name__):
        if mutant.line in (12, 17, 20) and mutant.kind != "off by one":
            assert apply_mutant(mutant)
            got = {12: lambda: step.size, 17: step.word, 20: lambda: step.on}[mutant.line]()
            assert got == {12: 8, 17: "max", 20: False}[mutant.line]
    first = source_mutants(module.__name__)[0]
    none = SourceMutant(first.module, first.node, "", "", "", 0, lambda _: None)
    assert apply_mutant(none)  # back to what it was
    assert step.on
    assert not apply_mutant(none)


def test_every_reason_matches_a_mutant():
    """Every entry of the table of equivalent changes matches a mutant, and none occurs twice."""
    keys = [(entry.module, entry.where, entry.slip) for entry in EQUIVALENT]
    there = {
        (mutant.module, mutant.where, mutant.slip)
        for module in checks.MODULE_CHECKS
        for mutant in source_mutants(module)
    }
    assert [key for key in keys if key not in there] == []
    assert len(set(keys)) == len(keys)
    assert all(entry.reason for entry in EQUIVALENT)

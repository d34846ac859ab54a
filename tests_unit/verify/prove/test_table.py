"""The stored table of proofs: it is of the rules of now, and calls are looked up in it."""

import json

import pytest

from hyper_parallel.core.shard.rule import rule_names
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.prove import table as tables
from hyper_parallel.verify.prove.table import ProofTable, RowsOfCall, operator_digest, proven_calls, stored_table
from tests_unit.verify.suite.schema import problems_of

ROW = "Shard(0), Replicate() -> Shard(0)"


def small(platform, **levels):
    """Return a table of linear that is of the rules of now."""
    return ProofTable("2026-11-30", {"linear": levels}, {"linear": operator_digest(platform, "linear")})


def test_stored_table_is_of_the_rules_of_now(platform_name):
    """Every operator is in the table, with the rows that its rule has now, on both frameworks."""
    table = stored_table()
    with use_platform(platform_name):
        assert set(table.levels) == set(rule_names())
    stale = [op for op in table.levels if table.is_stale(platform_name, op)]
    assert stale == [], "run `hyper-parallel prove ops --report run.json` and `python ci/workshop proofs run.json`"


def test_the_table_is_small():
    """The package does not grow by the reasons and conditions of every row."""
    assert tables.FILE.stat().st_size < 64_000


def test_the_text_of_a_table_is_the_table(tmp_path, monkeypatch):
    """What is written is read again, with a line per operator, so that changes of the file can be reviewed."""
    table = stored_table()
    assert table.text() == tables.FILE.read_text(encoding="utf-8")
    assert len(table.text().splitlines()) == len(table.levels) + 2
    monkeypatch.setattr(tables, "FILE", tmp_path / "table.json")
    tables.FILE.write_text(table.text(), encoding="utf-8")
    stored_table.cache_clear()
    assert stored_table() == table
    stored_table.cache_clear()


@pytest.mark.platforms("torch")
def test_a_row_has_the_worst_level_of_its_samples():
    """A row that is proven in one sample and tested in another is a tested row; a composed operator has none."""
    claimed = [row for _, row, *_ in tables._claims("torch", "linear")]
    rows = [{"op": "linear", "row": row, "level": "proven"} for row in claimed]
    report = {"header": {"date": "d"}, "composed": ["cross_entropy"], "rows": [*rows, {**rows[0], "level": "tested"}]}
    table = tables.table_of(report)
    assert table.level("linear", claimed[0]) == "tested"
    assert {table.level("linear", row) for row in claimed[1:] if row != claimed[0]} == {"proven"}
    assert table.counts("linear") == {"tested": 1, "proven": len(set(claimed)) - 1}
    assert table.counts("cross_entropy") == {}


@pytest.mark.platforms("torch")
def test_a_run_of_other_rules_is_refused():
    """A row that the rule does not have now is not stored as proven."""
    report = {"header": {"date": "d"}, "composed": [], "rows": [{"op": "relu", "row": ROW, "level": "proven"}]}
    with pytest.raises(ValueError, match=r"^relu: the run of prove ops has other rows than .*S0,R>S0"):
        tables.table_of(report)


def test_calls_have_the_level_of_their_worst_row(platform_name):
    """A call on two axes is proven if both of its rows are; equal calls of several ranks count once."""
    table = small(platform_name, **{"S0,R>S0": "proven", "R,S0>S1": "tested"})
    proven = RowsOfCall("linear", (ROW,), ((4, 3), (5, 3)))
    mixed = RowsOfCall("linear", (ROW, "Replicate(), Shard(0) -> Shard(1)"), ((4, 3), (5, 3)))
    alike = RowsOfCall("linear", (), ((4, 3), (5, 3)))
    unknown = RowsOfCall("mine", ("Shard(7) -> Shard(7)",), ((4,),))
    found = proven_calls(platform_name, [proven, mixed, proven, alike, unknown], table)
    assert found.counts == {"proven": 1, "tested": 1, "assumed": 0, "unlisted": 1}
    assert found.row_lines() == [
        "tested: linear: Replicate(), Shard(0) -> Shard(1)",
        "unlisted: mine: Shard(7) -> Shard(7)",
    ]
    assert found.line() == (
        "rows of 3 operator calls: 1 proven for every size, 1 tested on small sizes, 1 without a sample"
    )
    assert problems_of(json.loads(json.dumps(found.json())), "proofs") == []


def test_rows_of_other_rules_are_not_proven(platform_name):
    """If the rule of an operator has changed since the proof, the table says so, and its rows are unlisted."""
    table = ProofTable("2026-11-30", {"linear": {"S0,R>S0": "proven"}}, {"linear": "another"})
    found = proven_calls(platform_name, [RowsOfCall("linear", (ROW,), ((4, 3), (5, 3)))], table)
    assert found.counts["unlisted"] == 1
    assert found.other_rules == ("linear",)
    assert found.line().endswith("; the table is of other rules: linear")


def test_an_operator_of_whole_layouts_is_assumed(platform_name):
    """An operator whose rule has no rows has one level for all placements."""
    table = small(platform_name, all="assumed")
    assert table.level("linear", ROW) == "assumed"
    assert proven_calls(platform_name, [], table).line() == "rows of 0 operator calls: none"

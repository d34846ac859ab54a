"""A row that is proven, and fails in the sweep or in a random program, makes the night red."""

import json

import pytest

from hyper_parallel.verify.prove.table import ProofTable
from workshop.nights import contradictions as module
from workshop.nights.changes import NightChanges
from workshop.nights.history import History, night_of
from workshop.nights.reports import read_reports

TABLE = ProofTable("d", {"add": {"S0,R>S0": "proven", "R,S0>S0": "tested", "R,R>R": "proven"}}, {"add": "x"})


def sweep(places, mesh=(2,)):
    """Return a report of a sweep in which one check failed."""
    failed = {"places": places, "mesh": mesh, "problem": "3, single device 2"}
    operator = {"op": "add", "platform": "torch", "wrong": [failed], "outcome": "wrong", "checks": 1, "backward": 0,
                "coverage": {}, "seconds": 1.0, "skipped": {}, "missing": [], "unexercised": []}  # fmt: skip
    return {"operators": [operator], "columns": [], "ok": False, "outcomes": {"wrong": 1}, "checks": 1, "backward": 0,
            "mode": "quick", "planned": 1, "seconds": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    "places, rows",
    [
        ("[Shard(0)], [Replicate()]", "S0,R>S0"),
        ("[Shard(0), Replicate()], [Replicate(), Replicate()]", "S0,R>S0 and R,R>R"),
        ("[Replicate()], [Shard(0)]", ""),
        ("[Shard(0), Replicate()], [Replicate(), Shard(0)]", ""),
        ("[Shard(7)], [Replicate()]", ""),
        ("[Shard(0)], [Replicate(), Replicate()]", ""),
        ("", ""),
    ],
)
def test_what_contradicts_a_proof(places, rows):
    """A failed check contradicts the table if the rows on all of its axes are proven, and only then."""
    found = module.contradictions(sweep(places), TABLE)
    assert [line.partition("row ")[2].partition(" is proven")[0] for line in found] == ([rows] if rows else [])


@pytest.mark.parametrize(
    "kind, rows, contradicts",
    [
        ("wrong", [["Shard(0), Replicate() -> Shard(0)"], []], True),
        ("wrong", [["Shard(0), Replicate() -> Shard(0)"], ["Replicate(), Shard(0) -> Shard(0)"]], False),
        ("wrong", [[]], False),
        ("hang", [["Shard(0), Replicate() -> Shard(0)"]], False),
    ],
)
def test_random_programs(kind, rows, contradicts):
    """A program with a wrong value contradicts the table if the rows of all its calls are proven, and only then."""
    calls = [{"op": "add", "rows": each, "shapes": []} for each in rows]
    finding = {"framework": "torch", "kind": kind, "text": "3, single device 2", "seed": 5, "number": 7, "rows": calls}
    line = (
        "program 7 of seed 5 on torch: all rows of its calls are proven (add: Shard(0), Replicate() -> Shard(0)), and "
        "it fails: 3, single device 2"
    )
    assert module.contradictions({"findings": [finding]}, TABLE) == ((line,) if contradicts else ())


def test_a_night_with_a_failed_proof_is_red(tmp_path, monkeypatch):
    """The page's verdict names the proven row and the check that failed; other failed rows leave it as it is."""
    monkeypatch.setattr(module, "stored_table", lambda: TABLE)
    nights = []
    for places in ("[Replicate()], [Shard(0)]", "[Shard(0)], [Replicate()]"):
        path = tmp_path / "ops.json"
        path.write_text(json.dumps(sweep(places)))
        reports = read_reports([path])
        nights.append(NightChanges(reports, History((night_of(reports),))))
    unproven, proven = nights
    assert unproven.ok
    assert not proven.ok
    assert proven.summary().endswith(
        "; add on torch: row S0,R>S0 is proven, and fails on mesh 2 with [Shard(0)], [Replicate()]: 3, single device 2"
    )

"""`python ci/workshop proofs`: the stored table is written from a run, and rows that lost their proof are named."""

import json

import pytest

from hyper_parallel.verify.prove import table as tables
from workshop.commands import main

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Put the table into a file of this test, and return it."""
    file = tmp_path / "table.json"
    monkeypatch.setattr(tables, "FILE", file)
    tables.stored_table.cache_clear()
    yield file
    tables.stored_table.cache_clear()


def run(tmp_path, level):
    """Write the report of a run in which the rows of relu have a level, and return its path."""
    rows = [{"op": "relu", "row": row, "level": level} for _, row, *_ in tables._claims("torch", "relu")]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"header": {"date": "2026-11-30"}, "composed": ["cross_entropy"], "rows": rows}))
    return str(path)


def test_rows_that_lost_their_proof_are_named(tmp_path, stored, capsys):
    """The first table has nothing to compare with; a row that is only tested afterwards is a loss, status 1."""
    assert main(["proofs", run(tmp_path, "proven")]) == 0
    assert capsys.readouterr().out.startswith("2 operators, ")
    assert tables.stored_table().level("relu", "Shard(0) -> Shard(0)") == "proven"
    assert main(["proofs", run(tmp_path, "tested")]) == 1
    assert "relu: S0>S0: proven -> tested\n" in capsys.readouterr().out
    assert main(["proofs", run(tmp_path, "proven"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "relu: S0>S0: tested -> proven" in found["changes"]
    assert found["operators"] == 2
    assert stored.read_text().startswith('{"date": "2026-11-30"')


def test_a_run_that_cannot_be_a_table(tmp_path, stored, capsys):
    """A file that is no run, and a run with rows that the rule lacks now, leave the stored table as it is."""
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["proofs", str(other)]) == 2
    assert "has no header, composed, rows" in capsys.readouterr().err
    rows = [{"op": "relu", "row": "Shard(7) -> Shard(7)", "level": "proven"}]
    other.write_text(json.dumps({"header": {"date": "d"}, "composed": [], "rows": rows}))
    assert main(["proofs", str(other)]) == 2
    assert "has other rows than the rule has now" in capsys.readouterr().err
    assert not stored.exists()

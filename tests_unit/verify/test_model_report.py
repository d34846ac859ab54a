"""The verdict, the order and the JSON of a report."""

import json

import pytest

from hyper_parallel.core.dtensor.events import Event
from hyper_parallel.verify.engine.checks import TensorCheck
from hyper_parallel.verify.model_report import REQUIRED, ModelReport, traffic
from hyper_parallel.verify.prove.table import ProvenCalls


def check(kind="output", module="a", step=0, rank=0, why="", values=3, error=0.0):
    """Return one comparison."""
    return TensorCheck(kind, module, f"{module}.x", step, rank, values, error, 1e-9, why)


def report(*checks, **fields):
    """Return a report of one run."""
    return ModelReport("toy", "torch", "simulated", "tp=2", 1, list(checks), seconds=1.0, **fields)


def test_all_kinds_must_have_been_compared():
    """A run that compared nothing, or nothing of one kind, is not ok, and its verdict names the kind."""
    assert not report().ok
    assert report().verdict() == (
        "toy on torch (tp=2, simulated, 1.0 s): NOT VERIFIED: nothing compared of kind output, loss, gradient, weight"
    )
    for left_out in REQUIRED:
        some = report(*(check(kind) for kind in REQUIRED if kind != left_out))
        assert not some.ok
        assert some.verdict().endswith(f"NOT VERIFIED: nothing compared of kind {left_out}")
    empty = report(*(check(kind, values=0) for kind in REQUIRED))
    assert not empty.ok
    assert report(*(check(kind) for kind in REQUIRED)).ok


def test_an_error_is_never_ok():
    """A run that ended with an error is not ok, whatever it compared before."""
    ended = report(*(check(kind) for kind in REQUIRED), error="rank 0 failed\ntraceback", cause="ValueError: no")
    assert not ended.ok
    assert ended.verdict() == "toy on torch (tp=2, simulated, 1.0 s): ENDED: ValueError: no"
    assert "  traceback" in ended.text().splitlines()


def test_seed_and_device_are_shown():
    """A report says which seed was drawn from and, where it was not the CPU, on which device ranks ran."""
    lines = report(settings={"seed": 7, "device": "cuda"}).text().splitlines()
    assert lines[1:3] == ["  seed: 7", "  device: cuda"]


def test_first_divergence_is_the_first_check_that_is_wrong():
    """What differs is listed in the order of execution: the first divergence is the first of it."""
    checks = [check(module="a"), check(module="b", rank=1, why="differs"), check("loss", "b", step=1, why="x")]
    diverged = report(*checks)
    assert diverged.faulty_module == "b"
    assert diverged.first == checks[1]
    assert diverged.verdict() == (
        "toy on torch (tp=2, simulated, 1.0 s): DIVERGED first in module b: step 1, output of b.x, rank 1: differs"
    )


def test_a_run_that_leaves_something_out_is_not_equal():
    """A rank that stops early, or lacks a parameter, makes a run that is not verified."""
    partial = report(*(check(kind) for kind in REQUIRED), incomplete=["rank 1 stops after step 1"])
    assert not partial.ok
    assert partial.verdict().endswith("NOT VERIFIED: rank 1 stops after step 1")


def test_traffic_sums_per_module_and_collective():
    """Collectives of one kind in one module are one line with count, bytes and the number of implicit ones."""

    def event(module, collective, implicit):
        return Event(0, module, "op", "x", "s", "t", collective, 8, ("tp",), "forward", implicit)

    rows = traffic([event("m", "all_reduce", False), event("n", "all_gather", True), event("m", "all_reduce", True)])
    assert [(row.module, row.collective, row.count, row.bytes, row.implicit) for row in rows] == [
        ("m", "all_reduce", 2, 16, 1),
        ("n", "all_gather", 1, 8, 1),
    ]
    text = report(traffic=rows).text()
    assert "    m       forward  all_reduce  tp        2     16         1" in text.splitlines()
    assert text.splitlines()[-1] == "    3 collectives, 24 bytes"


def test_summaries_lead_with_the_first_divergence():
    """The module that diverged first leads, then others by the step in which they differ, then equal ones."""
    summaries = report(
        check(module="a"), check(module="b", why="x", error=2.0), check("gradient", "b"),
        check(module="c", step=1, why="x"), check(module="d", step=0, why="x"), check(module="a", rank=1, error=1e-10),
    ).summaries()  # fmt: skip
    assert [(summary.module, summary.kind, summary.wrong, summary.since, summary.first) for summary in summaries] == [
        ("b", "output", 1, 0, True), ("b", "gradient", 0, None, True), ("d", "output", 1, 0, False),
        ("c", "output", 1, 1, False), ("a", "output", 0, None, False),
    ]  # fmt: skip
    assert (summaries[-1].tensors, summaries[-1].values, summaries[-1].worst.error) == (2, 6, 1e-10)
    assert not any(summary.first for summary in report(check()).summaries())


def test_json_has_both_losses_without_infinities():
    """Losses of both runs are in the JSON; one that is not finite is null there."""
    document = report(losses=[1.0, 2.0], parallel_losses=[1.0, float("nan")], settings={"optimizer": "sgd"}).json()
    assert (document["losses"], document["parallel_losses"]) == ([1.0, 2.0], [1.0, None])
    assert document["settings"] == {"optimizer": "sgd"}


@pytest.mark.parametrize("error", [0.0, float("inf")])
def test_json_is_json(error):
    """The JSON of a report has no infinity in it, and has the faulty module."""
    document = json.loads(json.dumps(report(check(why="differs", error=error)).json(), allow_nan=False))
    assert document["ok"] is False
    assert document["faulty_module"] == "a"
    assert document["compared"] == {"output": 1, "loss": 0, "gradient": 0, "weight": 0}


def test_how_much_is_proven_is_one_line():
    """A report says how many operator calls use proven rows; one whose ranks ended early has no such line."""
    proofs = ProvenCalls("2026-11-30", {"proven": 2, "tested": 1}, (("tested", "relu", "Shard(0) -> Shard(0)"),), ())
    told = report(*(check(kind) for kind in REQUIRED), proofs=proofs)
    assert "  rows of 3 operator calls: 2 proven for every size, 1 tested on small sizes" in told.text().splitlines()
    assert told.json()["proofs"]["calls"] == {"proven": 2, "tested": 1}
    assert report().json()["proofs"] is None
    assert "operator calls" not in report().text()

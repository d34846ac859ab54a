"""Ranks that feed other samples to their model than the reference."""

from __future__ import annotations

import numpy as np

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run


def run(inputs, losses, factor=2):
    """Return a run whose ranks compute a multiple of their inputs, and a loss."""
    ranks = []
    for rank, (rows, loss) in enumerate(zip(inputs, losses, strict=True)):
        records = [
            Record("output", "body", "body", 0, 0, factor * rows),
            Record("loss", "loss", "", 0, 0, np.asarray(loss)),
            Record("gradient", "w", "", 0, 0, np.asarray([loss, 1.0])),
        ]
        ranks.append(RankRecords(rank, records, [], {"inputs": [(0, "x", rows), (0, "scale", np.asarray(2.0))]}))
    return Run(ranks)


def test_other_samples_are_the_cause_of_what_follows():
    """An output of rows that the reference never saw is named before the loss, with the rows that are foreign."""
    rows = np.random.default_rng(0).standard_normal((9, 4))
    reference = run([rows[:5]], [1.0])
    verdict = compare_runs(reference, [reference], run([rows[:3], rows[6:8]], [0.2, 0.4]), mesh={"dp": 2})
    assert (verdict.first.kind, verdict.first.name, verdict.first.ranks) == ("output", "body", (1,)), verdict.text()


def test_ranks_that_have_no_sample_of_the_reference():
    """Where no part is recognised at all, every rank's foreign rows are counted."""
    rows = np.random.default_rng(0).standard_normal((12, 4))
    reference = run([rows[:5]], [1.0])
    first = compare_runs(reference, [reference], run([rows[5:8], rows[8:11]], [0.2, 0.4])).first
    assert (first.kind, first.name, first.ranks, first.cause.kind) == ("output", "body", (0, 1), "data")
    assert first.cause.evidence == (
        "the models get input rows that the single device does not get: 3 on rank 0, 3 on rank 1"
    )


def test_ranks_that_have_the_same_samples():
    """Where ranks feed the same rows and some of the reference's are on no rank, the data is the cause."""
    rows = np.random.default_rng(0).standard_normal((6, 4))
    reference = run([rows], [1.0])
    first = compare_runs(reference, [reference], run([rows[::2]] * 2, [0.2, 0.4]), mesh={"dp": 2}).first
    assert (first.kind, first.name, first.ranks, first.cause.kind) == ("output", "body", (0, 1), "data")
    assert first.cause.evidence == (
        "ranks 0, 1 feed the same input rows to their models, and no rank feeds 3 of the 6 rows that the single device "
        "does"
    )


def test_ranks_that_share_one_batch_lose_no_sample():
    """Where the ranks' rows are the reference's, another cause is sought."""
    rows = np.random.default_rng(0).standard_normal((6, 4))
    reference = run([rows], [1.0])
    first = compare_runs(reference, [reference], run([rows] * 2, [3.0] * 2, factor=6), mesh={"tp": 2}).first
    assert (first.kind, first.name, first.cause.kind) == ("output", "body", "scaled-by-count")

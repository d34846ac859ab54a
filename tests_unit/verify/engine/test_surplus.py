"""What ranks have more of than the single device is a cause only where the numbers show it."""

import numpy as np
import pytest

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.surplus import skipped_step, untied
from hyper_parallel.verify.engine.verdict import Difference
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

RNG = np.random.default_rng(13)
OWN, REST, WEIGHT = (RNG.standard_normal((5, 3)) for _ in range(3))
KEY = ("gradient", "embedding.weight", 0, 0)


def record(kind, name, step, value):
    """Return a record of a weight or of its gradient."""
    return Record(kind, name, name.rpartition(".")[0], step, 0, np.asarray(value))


def rank(gradient, head=None):
    """Return a rank's records: the embedding's gradient, and that of an output layer with a weight of its own."""
    records = [record("weight", KEY[1], -1, WEIGHT), record("weight", "head.weight", -1, WEIGHT)]
    records += [record("gradient", KEY[1], 0, gradient)]
    return records + ([] if head is None else [record("gradient", "head.weight", 0, head)])


def made(*ranks):
    """Return the run of the single device, whose weight is one for both, and that of the ranks."""
    alone = Run([RankRecords(0, [record("weight", KEY[1], -1, WEIGHT), record("gradient", KEY[1], 0, OWN + REST)])])
    return alone, Run([RankRecords(place, each) for place, each in enumerate(ranks)])


def cause_of(*ranks, key=KEY, differs=None):
    """Return the cause of the embedding's gradient."""
    alone, parallel = made(*ranks)
    paired = PairedRuns(alone, [alone], parallel, None, None)
    where = tuple(range(len(ranks))) if differs is None else differs
    wrong = {key: Difference(key[0], key[1], "embedding", where, 0, 0, 1.0, 0.1, "")}
    return untied(paired, key, wrong, Evidence(paired, KEY, where))


def test_a_weight_that_is_two_is_the_cause():
    """Both gradients add up to the single device's on every rank where it differs."""
    alone, parallel = made(rank(OWN, REST), rank(OWN, REST))
    verdict = compare_runs(alone, [alone], parallel, mesh={"tp": 2})
    assert (verdict.first.cause.kind, verdict.first.name) == ("untied", KEY[1])
    said = "with the gradient of head.weight, a weight that only the ranks have, it equals the reference within "
    assert verdict.first.cause.evidence.startswith(said)


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(OWN), rank(OWN)],
        [rank(OWN, REST), rank(OWN)],
        [rank(OWN, REST[:4]), rank(OWN, REST[:4])],
        [rank(OWN, 2 * REST), rank(OWN, REST)],
        [rank(OWN, 0 * REST), rank(OWN, 0 * REST)],
    ],
    ids=["no gradient", "one rank's", "another shape", "does not add up", "zero"],
)
def test_other_weights_explain_nothing(ranks):
    """A weight without a gradient of that shape on every rank, or whose gradient leaves a rest, is no cause."""
    assert cause_of(*ranks) is None


def test_only_gradients_that_differ_everywhere_are_tested():
    """Other kinds, and a difference of which some ranks show no wrong element, are not explained by a weight."""
    assert cause_of(rank(OWN, REST), rank(OWN, REST), key=("weight", KEY[1], 0, 0)) is None
    assert cause_of(rank(OWN, REST), rank(OWN + REST, REST), differs=(0, 1)) is None


def skipped(ranks, step, differs):
    """Return the cause of a loss of a step; ``ranks`` has the step of each loss, the single device one in each."""
    runs = [
        [Record("loss", "loss", "", at, steps[:n].count(at), np.float64(n)) for n, at in enumerate(steps)]
        for steps in ([0, 1, 2], *ranks)
    ]
    alone = Run([RankRecords(0, runs[0])])
    parallel = Run([RankRecords(place, each) for place, each in enumerate(runs[1:])])
    key = ("loss", "loss", step, 0)
    wrong = {key: Difference("loss", "loss", "", differs, step, 0, 1.0, 0.1, "")}
    return skipped_step(PairedRuns(alone, [alone], parallel, None, None), key, wrong, None)


def test_two_losses_in_a_step_and_as_many_in_all_are_a_step_that_was_left_out():
    """The ranks and the step are named."""
    said = (
        " losses in step 2 where the single device has 1, and equally many in total: the optimizer skips its step "
        "after the first of them, as it does when gradients overflow"
    )
    both = skipped([[0, 1, 1], [0, 1, 1]], 2, (0, 1))
    assert (both.kind, both.evidence) == ("skipped-step", f"ranks 0, 1 have 2{said}")
    assert skipped([[0, 1, 2], [0, 1, 1]], 1, (1,)).evidence == f"rank 1 has 2{said}"


@pytest.mark.parametrize(
    "ranks, step, differs",
    [
        ([[0, 1, 2], [0, 1, 2]], 1, (0, 1)),
        ([[0, 0, 1, 1, 2, 2], [0, 1, 2]], 1, (0,)),
        ([[0, 1, 1], [0, 1, 1]], 0, (0, 1)),
        ([[0, 1, 1], [0, 1, 2]], 2, (1,)),
    ],
    ids=["as many", "micro-batches", "before it", "another rank"],
)
def test_other_losses_are_no_step_that_was_left_out(ranks, step, differs):
    """Micro-batches have more losses in all, and values before the step or of other ranks are no symptom."""
    assert skipped(ranks, step, differs) is None

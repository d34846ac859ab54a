"""`--accumulate`: micro-batches train like one batch, or the report says how their gradients are weighted."""

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.engine.bounds import Bounds
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.accumulation import explain_micro_batches, own_draws, require_one_batch

pytestmark = pytest.mark.platforms("torch")

SCRIPT = """
import argparse
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

options = argparse.ArgumentParser()
options.add_argument("--accum", type=int, default=2)
options.add_argument("--bug", default="")
options.add_argument("--layer", default="")
options.add_argument("--seed", type=int, default=0)
given = options.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(given.seed)
more = {"norm": [nn.BatchNorm1d(11)], "": []}[given.layer]
model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 11), *more, nn.Tanh(), nn.Linear(11, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    x, y, kept = torch.randn(24, 7), torch.randn(24, 5), torch.rand(24, 5) > torch.linspace(0.1, 0.9, 24)[:, None]
    total = kept.sum()
    for inputs, targets, counted in zip(x.chunk(given.accum), y.chunk(given.accum), kept.chunk(given.accum)):
        if given.bug == "zeroed":
            optimizer.zero_grad()
        own = [value.tensor_split(world)[rank] for value in (inputs, targets, counted)]
        if given.layer:  # statistics of the batch, which are those of one rank only if each has the batch
            own = inputs, targets, counted
        squares = ((model(own[0]) - own[1]) ** 2 * own[2]).sum() * (1 if given.layer else world)
        if given.bug == "means":
            loss = squares / counted.sum() / given.accum
        elif given.bug == "summed":
            loss = squares / total * given.accum
        else:
            loss = squares / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
"""


LOST = (
    "the optimizer sees the gradient of micro-batch 3 of 3; that of 1, 2 is lost, as after a zero_grad() between them; "
    "weights of the micro-batches' own gradients: 0, 0, 1; one batch gives 1, 1, 1"
)
SUMMED = (
    "losses of micro-batches are added up, not averaged; weights of the micro-batches' own gradients: 1, 1, 1; one "
    "batch gives 0.3333, 0.3333, 0.3333"
)
MEANS = (
    "micro-batches do not weigh what they weigh in one batch, as means over unequal numbers of tokens do; weights of "
    "the micro-batches' own gradients: 1, 1, 1; one batch gives 1.722, 0.8333, 0.4444"
)


@pytest.fixture
def script(tmp_path):
    """A data-parallel script that accumulates, with a loss that counts some elements."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


# One world shows the rule every day: the parts are unequal, and the sizes of ranks too.
@pytest.mark.parametrize(
    "world, accum",
    [pytest.param(2, "4", marks=pytest.mark.sweep), (3, "2"), pytest.param(4, "3", marks=pytest.mark.sweep)],
)
def test_right_micro_batches_are_equal_to_one_batch(script, world, accum):
    """A loss that divides by the count of the whole batch gives the gradient of one batch, for any number of parts."""
    report = verify_program(script, world, args=["--accum", accum], accumulate=["--accum", "1"])
    assert report.ok, report.text()
    (case,) = report.hardened
    assert (case.title, case.verdict.counts["gradient"], case.verdict.counts["norm"]) == ("accumulate", 16, 4)
    assert (case.verdict.counts["loss"], case.verdict.counts["output"]) == (0, 0)
    assert case.verdict.skipped == []


@pytest.mark.parametrize(
    "bug, kind, axis, sentence",
    [
        ("zeroed", "micro-batches-lost", "", LOST),
        # Which cause the weights name is also shown without a run, in test_weights_of_micro_batches_name_the_cause.
        pytest.param("summed", "sum-for-average", "micro-batches", SUMMED, marks=pytest.mark.sweep),
        ("means", "scaled-by-count", "micro-batches", MEANS),
    ],
)
def test_a_bug_that_one_rank_has_too_is_found(script, bug, kind, axis, sentence):
    """Ranks agree with one rank, and both lose, add up or weight the micro-batches: the first step shows how."""
    report = verify_program(script, 2, args=["--accum", "3", "--bug", bug], accumulate=["--accum", "1", "--bug", bug])
    assert report.verdict.equal
    assert report.status == 1
    verdict = report.hardened[0].verdict
    assert (verdict.first.kind, verdict.first.step) == ("gradient", 0)
    assert (verdict.first.cause.kind, verdict.first.cause.axis) == (kind, axis)
    assert verdict.first.cause.evidence == sentence


def test_statistics_of_a_batch_are_said_and_not_counted(script):
    """Layers that see the batch differ by right: the relation says nothing, and the status is 3."""
    why = (
        "buffer 1.running_mean depends on the batch that a layer is called with, as statistics of a batch do; let the "
        "layer be in eval mode, or use one without such statistics"
    )
    arguments = ["--layer", "norm"]
    report = verify_program(script, 2, args=arguments, accumulate=["--accum", "1", *arguments], allow=["equal-data"])
    assert report.inconclusive == f"--accumulate says nothing about this program: {why}"
    assert (report.status, report.hardened[0].skipped) == (3, why)


def test_one_micro_batch_is_not_the_batch():
    """Arguments that train on one of the micro-batches are refused, with the option that is missing."""

    def run(*batches):
        inputs = [(call, "[0]", np.array(batch)) for call, batch in enumerate(batches)]
        return Run([RankRecords(0, [], notes={"inputs": inputs})])

    own = run([[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]])
    program = SimpleNamespace(name="train.py")
    assert require_one_batch(program, "", own, run([[5.0], [6.0], [3.0], [4.0], [1.0], [2.0]])) == 3
    with pytest.raises(InputError) as caught:
        require_one_batch(program, "--accum 1", own, run([[1.0], [2.0]]))
    assert str(caught.value) == (
        "--accumulate '--accum 1': in the first step train.py is trained on 6 samples with its own arguments and on 2 "
        "of them with these; the one batch must have all, such as '--accum 1 --batch 8' for a script that is run with "
        "'--accum 4 --batch 2'; `--accumulate auto` tries both options"
    )


def test_masks_and_statistics_make_micro_batches_incomparable():
    """Masks in either run, or a buffer that differs after a step, are the reason; equal buffers are none."""

    def rank(kind, value, step=0):
        return RankRecords(0, [Record(kind, "0", "", step, 0, np.array([value]))])

    masks = "dropout draws other masks for micro-batches than for one batch; set its probability to 0"
    assert own_draws(rank("mask", 1.0), rank("buffer", 1.0)) == masks
    assert own_draws(rank("buffer", 1.0), rank("mask", 1.0)) == masks
    assert own_draws(rank("buffer", 1.0), rank("buffer", 1.0)) == ""
    assert own_draws(rank("buffer", 1.0, -1), rank("buffer", 2.0, -1)) == ""
    assert own_draws(rank("buffer", 1.0), rank("buffer", 2.0)).startswith("buffer 0 depends on the batch")


def test_arguments_that_make_no_single_batch_are_refused(script):
    """The other run must make fewer micro-batches of the same samples."""
    with pytest.raises(InputError) as caught:
        verify_program(script, 2, args=["--accum", "2"], accumulate=["--accum", "4"])
    assert str(caught.value) == (
        f"--accumulate '--accum 4': {script} calls its model 2 times in the first step with its own arguments, and 4 "
        "times with these; they must make fewer and larger micro-batches, such as '--accum 1' for a script that is run "
        "with '--accum 4'"
    )
    with pytest.raises(InputError) as caught:
        verify_program(script, 2, args=["--accum", "2"], accumulate=["--accum", "1", "--seed", "1"])
    assert str(caught.value) == (
        f"--accumulate '--accum 1 --seed 1': in the first step {script} is trained on 24 samples with its own "
        "arguments and on 24 with these, 24 of which are others; both must train on the same samples"
    )
    with pytest.raises(InputError) as caught:
        verify_program(script, 2, accumulate=[])
    assert str(caught.value) == (
        "--accumulate is empty; give the arguments with which the script makes the run to compare"
    )


def paired(one_batch, accumulated):
    """Return both runs side by side, each with one gradient of the first step."""

    def run(value):
        weight = Record("weight", "w", "", -1, 0, np.arange(6.0).reshape(2, 3))
        return Run([RankRecords(0, [weight, Record("gradient", "w", "", 0, 0, value)])])

    reference = run(one_batch)
    bounds = Bounds(reference, [run(one_batch * (1 + 1e-15)), run(one_batch * (1 - 1e-15))])
    return PairedRuns(reference, bounds, run(accumulated), None, None)


@pytest.mark.parametrize(
    "wanted, actual, kind, words",
    [
        ((0.5, 0.5), (0.25, 0.25), "average-for-sum", "losses of micro-batches are averaged, not added up"),
        ((1.0, 1.0), (0.7, 0.7), "scaled", "all micro-batches weigh 0.7 times too much"),
        ((0.3, 0.7), (0.5, 0.5), "scaled-by-count", "micro-batches do not weigh what they weigh in one batch"),
        ((1.0, 1.0), (1.0, 0.0), "micro-batches-lost", "the optimizer sees the gradient of micro-batch 1 of 2"),
    ],
)
def test_weights_of_micro_batches_name_the_cause(wanted, actual, kind, words):
    """The weights are fitted to both runs, and a cause is named only where both fit within the bounds."""
    random = np.random.default_rng(3)
    parts = [{"w": random.standard_normal((2, 3))} for _ in range(2)]

    def total(weights):
        return sum(weight * part["w"] for weight, part in zip(weights, parts, strict=True))

    runs = paired(total(wanted), total(actual))
    cause = explain_micro_batches(runs, 0, parts)
    assert (cause.kind, cause.evidence[: len(words)]) == (kind, words)
    assert explain_micro_batches(paired(total(wanted), random.standard_normal((2, 3))), 0, parts) is None
    assert explain_micro_batches(runs, 0, [parts[0], parts[0]]) is None
    assert explain_micro_batches(runs, 0, parts[:1]) is None
    assert explain_micro_batches(runs, 0, [{"w": parts[0]["w"]}, {"w": np.full((2, 3), np.nan)}]) is None

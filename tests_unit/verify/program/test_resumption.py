"""`--resume`: a script that is stopped and started again goes on as before, or the report says what is lost."""

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program import resumption
from hyper_parallel.verify.program.resumption import resumed_step

pytestmark = pytest.mark.platforms("torch")

SCRIPT = """
import argparse, os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

options = argparse.ArgumentParser()
options.add_argument("--resume", default="")
options.add_argument("--lost", default="")
options.add_argument("--every", type=int, default=1)
options.add_argument("--optimizer", default="AdamW")
given = options.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
model = DistributedDataParallel(net)
more = {"momentum": 0.9} if given.optimizer == "SGD" else {}
optimizer = getattr(torch.optim, given.optimizer)(model.parameters(), lr=0.1, **more)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
start = 0
if given.resume:
    kept = torch.load(given.resume)
    restore = {
        "weights": lambda: net.load_state_dict(kept["weights"]),
        "optimizer": lambda: optimizer.load_state_dict(kept["optimizer"]),
        "schedule": lambda: schedule.load_state_dict(kept["schedule"]),
        "random": lambda: torch.set_rng_state(kept["random"]),
    }
    for name, load in restore.items():
        if name != given.lost:
            load()
    if given.lost == "optimizer":
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr()):
            group["lr"] = rate
    if given.lost == "bias":
        with torch.no_grad():
            net[2].bias.zero_()
    start = kept["done"]
for step in range(start, 4):
    x, y = torch.randn(12, 7), torch.randn(12, 3)
    own = [value.tensor_split(world)[rank] for value in (x, y)]
    nn.functional.mse_loss(model(own[0]), own[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if rank == 0 and given.every and (step + 1) % given.every == 0:
        torch.save({
            "weights": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
            "random": torch.get_rng_state(), "done": step + 1,
        }, "last.pt")
    dist.barrier()
"""


@pytest.fixture
def script(tmp_path):
    """A data-parallel script that saves after its steps, and resumes what it has saved."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    "world, later, after, every, optimizer",
    [
        pytest.param(2, None, None, 1, "AdamW", marks=pytest.mark.sweep),  # the third without another world
        (3, 2, 3, 2, "SGD"),
        pytest.param(2, 4, 1, 1, "Adagrad", marks=pytest.mark.sweep),  # more ranks for fewer
    ],
)
def test_what_is_restored_goes_on_as_if_it_had_not_stopped(script, tmp_path, world, later, after, every, optimizer):
    """Everything is equal to the uninterrupted run, also on other ranks and from a checkpoint before the stop."""
    arguments = ["--every", str(every), "--optimizer", optimizer]
    report = verify_program(
        script, world, args=arguments, resume=[*arguments, "--resume", "last.pt"], resume_after=after,
        resume_world=later,
    )  # fmt: skip
    assert report.ok, report.text()
    (case,) = report.hardened
    saved = (after or 2) // every * every
    on = f" on {later} ranks" if later else ""
    start = f"stopped after step {after or 2}, and started again{on} from what it saved after step {saved}: "
    assert case.words == [f"{start}--every {every} --optimizer {optimizer} --resume last.pt"]
    assert case.verdict.counts["gradient"] == 16 * (later or world)
    assert not (tmp_path / "last.pt").exists()


ANEW = "all gradients are right, and the momentum is the gradient of 0.weight alone: the optimizer's state starts anew"
COUNTED = "all gradients are right; the optimizer has counted 1 step, 3 without a stop: its state starts anew"
OTHER = "it starts again from another value than the uninterrupted run has after step 2"
SAME = "all weights that it starts again from are those after step 2; "
DRAWN = SAME + "the first output of the next step differs: other samples, or another random state"


@pytest.mark.parametrize(
    "lost, optimizer, kind, step, evidence",
    [
        # What each says is also shown without a run, in test_what_a_first_difference_says.
        pytest.param("schedule", "AdamW", "rate", 3, "", marks=pytest.mark.sweep),
        pytest.param("random", "AdamW", "output", 2, DRAWN, marks=pytest.mark.sweep),
        ("bias", "AdamW", "weight", 1, OTHER),
        pytest.param("optimizer", "SGD", "state", 2, ANEW, marks=pytest.mark.sweep),
        ("optimizer", "AdamW", "state", 2, COUNTED),
    ],
)
def test_what_is_lost_is_named(script, lost, optimizer, kind, step, evidence):
    """The first value that differs after the second start says what was not restored."""
    arguments = ["--lost", lost, "--optimizer", optimizer]
    report = verify_program(script, 2, args=arguments, resume=[*arguments, "--resume", "last.pt"])
    assert report.verdict.equal
    assert report.status == 1
    first = report.hardened[0].verdict.first
    assert (first.kind, first.step) == (kind, step), report.text()
    if evidence:
        assert (first.cause.kind, first.cause.evidence) == ("not-restored", evidence)


def refusal(script, arguments=(), **options):
    """Return the message with which a verification is refused."""
    with pytest.raises(InputError) as caught:
        verify_program(script, 2, args=list(arguments), **options)
    return str(caught.value)


def test_a_second_start_that_resumes_nothing_is_refused(script):
    """Without a file, without steps that are left, or from the initial weights, nothing is claimed."""
    assert refusal(script, ["--every", "0"], resume=["--resume", "last.pt"]) == (
        f"--resume: {script} writes no file in its first 2 steps, so there is nothing to start again from; stop it "
        "later with --resume-after"
    )
    assert refusal(script, resume=["--every", "2"]) == (
        f"--resume '--every 2': started again, {script} begins from its initial weights, so these arguments resume "
        "nothing; by step 2 it had written last.pt"
    )
    assert refusal(script, resume=["--resume", "last.pt"], resume_after=4) == (
        "--resume: the uninterrupted run makes 4 optimizer steps, so none is left after step 4 to be compared; let it "
        "make more, or stop it earlier with --resume-after"
    )


def test_a_failing_second_start_is_in_the_report(script):
    """A rank that raises when it is started again is what is wrong with the program."""
    report = verify_program(script, 2, resume=["--resume", "nosuch.pt"])
    assert (report.status, report.hardened[0].verdict) == (1, None)
    assert "nosuch.pt" in report.hardened[0].cause


def test_options_of_a_second_start_need_one(script, monkeypatch):
    """Where and when it is started again is said with --resume alone; functions and torchrun's ranks are refused."""
    assert refusal(script, resume_after=1) == (
        "--resume-after needs --resume, which gives the arguments of the script when it is started again"
    )
    assert refusal(script, resume_world=2) == (
        "--resume-world needs --resume, which gives the arguments of the script when it is started again"
    )
    assert refusal(f"{script}:main", resume=[], platform="torch") == (
        f"--resume starts a script again; {script}:main is a function"
    )
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert refusal(script, resume=[]) == (
        "--resume runs the ranks twice, which torchrun's processes cannot; leave out --resume or torchrun"
    )


def test_the_step_that_was_saved_is_found_from_the_weights():
    """The step before the stop counts unless another one is much closer; no shared weight tells nothing."""

    def rank(*values, first=-1):
        return RankRecords(
            0, [Record("weight", "w", "", step, 0, np.array([value])) for step, value in enumerate(values, first)]
        )

    first = rank(1.0, 2.0, 3.0)
    assert [resumed_step(first, rank(value), 1) for value in (3.0, 2.0, 1.0, 3.1)] == [1, 0, -1, 1]
    assert resumed_step(RankRecords(0, []), rank(1.0), 1) == 1
    empty = RankRecords(0, [Record("weight", "w", "", 1, 0, np.zeros(0))])
    again = RankRecords(0, [Record("weight", "w", "", -1, 0, np.zeros(0))])
    assert resumed_step(empty, again, 1) == 1


def _first_difference(kind, name, reference, rank):
    """Return two runs of one value each per key, and the difference of the first, in the second step."""

    def records(values):
        return {key: SimpleNamespace(value=np.asarray(value)) for key, value in values.items()}

    index, own = records(reference), records(rank)
    runs = SimpleNamespace(
        bounds=SimpleNamespace(
            reference=index,
            last_gradient=lambda name, step: key if (key := ("gradient", name, step, 0)) in index else None,
        ),
        ranks=[own],
        value=lambda key, _: own[key].value,
        placement=lambda key, _: key,
        expected=lambda key, _: (index[key].value, np.full(np.shape(index[key].value), 1e-9)),
    )
    return runs, SimpleNamespace(kind=kind, name=name, step=1, call=0, ranks=(0,))


SAME = "all weights that it starts again from are those after step 1; "


@pytest.mark.parametrize(
    "kind, name, reference, rank, evidence",
    [
        ("rate", "lr", {}, {}, ""),
        ("rate", "lr", {"lr": 0.1}, {"lr": 0.5}, f"{SAME}the learning rate is 0.5, and 0.1 without a stop"),
        ("mask", "m", {"m": [1]}, {"m": [0]}, f"{SAME}a mask is another one: the random state is not restored"),
        (
            "loss", "l", {"l": 1.0}, {"l": 2.0},
            f"{SAME}all outputs of the next step are right and the loss is not: other targets",
        ),
        ("norm", "n", {"n": 1.0}, {"n": 2.0}, ""),
        ("state", "w:exp_avg", {"w:exp_avg": [1.0]}, {"w:exp_avg": [2.0]}, ""),
        ("state", "w:momentum_buffer", {"w:momentum_buffer": [1.0]}, {"w:momentum_buffer": [2.0]}, ""),
    ],
)  # fmt: skip
def test_what_a_first_difference_says(kind, name, reference, rank, evidence):
    """Each kind of value says what it shows, and nothing where it shows nothing certain."""
    indices = [{(kind, key, 1, 0): value for key, value in values.items()} for values in (reference, rank)]
    assert resumption._not_restored(*_first_difference(kind, name, *indices), 0) == evidence


@pytest.mark.parametrize("momentum, gradient, certain", [(2.0, 2.0, True), (2.5, 2.0, False), (2.0, [2.0, 1.0], False)])
def test_a_momentum_that_is_one_gradient_started_anew(momentum, gradient, certain):
    """A momentum buffer that is the gradient of the step alone has lost what was before; any other says nothing."""
    key, slope = ("state", "w:momentum_buffer", 1, 0), ("gradient", "w", 1, 0)
    runs, first = _first_difference(
        key[0], key[1], {key: [3.0], slope: np.atleast_1d(gradient)}, {key: [momentum]}
    )  # fmt: skip
    evidence = resumption._not_restored(runs, first, 0)
    assert evidence.endswith("alone: the optimizer's state starts anew") == certain
    assert bool(evidence) == certain

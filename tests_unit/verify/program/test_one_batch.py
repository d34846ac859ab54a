"""`--accumulate auto` finds the options by which a script takes its batch at once by the samples that it sees then."""

import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.one_batch import candidate_arguments
from hyper_parallel.verify.program.program import Program

pytestmark = pytest.mark.platforms("torch")

SCRIPT = """
import argparse, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch-size", type=int, default=4)
parser.add_argument("--grad_accum", type=int, default=3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--zeroed", action="store_true")
given = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(given.seed + 7 * (given.seed > 0 and given.grad_accum == 1))
data = TensorDataset(torch.randn(24, 5), torch.randn(24, 1))
sampler = DistributedSampler(data, world, rank, shuffle=False)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for number, (x, y) in enumerate(DataLoader(data, given.micro_batch_size // world, sampler=sampler)):
    if given.zeroed:
        optimizer.zero_grad()
    (((model(x) - y) ** 2).mean() / given.grad_accum).backward()
    if (number + 1) % given.grad_accum == 0:
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= world
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the path of a script whose options have defaults."""
    path = tmp_path_factory.mktemp("accumulate") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_size_of_a_micro_batch_is_multiplied(script):
    """With one micro-batch alone the samples are others; `--all` finds the larger batch, and compares drawn samples."""
    report = verify_program(script, 2, all_relations=True, upcast=False, logged=False)
    assert report.ok, report.text()
    accumulated, drawn = report.hardened
    assert accumulated.words[0].endswith("takes one batch: --micro-batch-size 12 --grad_accum 1")
    assert drawn.verdict.counts == {"sample": 24}
    assert not report.untested


def test_lost_micro_batches_are_found(script):
    """A script that sets gradients to zero before each micro-batch differs from one batch."""
    report = verify_program(script, 2, args=["--zeroed"], accumulate=("auto",), upcast=False, logged=False)
    assert (report.ok, report.status) == (False, 1)
    (case,) = report.hardened
    assert next(each.cause for each in case.verdict.differences if each.cause).kind == "micro-batches-lost"


def test_without_an_option_the_sum_of_micro_batches_is_compared(script):
    """Where no candidate sees the same samples, every micro-batch must be in the optimizer's gradient."""
    given = {"upcast": False, "logged": False, "accumulate": ("auto",)}
    report = verify_program(script, 2, args=["--seed", "1"], **given)
    assert report.ok, report.text()
    (case,) = report.hardened
    assert case.verdict.counts == {"gradient": 4}
    (words,) = case.words
    assert words == (
        f"no option of {script} was found that makes it process one batch at once: the gradients of the first step are "
        "compared with those of its 3 micro-batches; the weight of each is not tested"
    )
    report = verify_program(script, 2, args=["--seed", "1", "--zeroed"], **given)
    assert (report.ok, report.status) == (False, 1)
    first = report.hardened[0].verdict.first
    assert first.why == "it is that of micro-batch 3 of 3 only"
    assert first.cause.kind == "micro-batches-lost"
    assert first.cause.evidence == (
        "the optimizer sees the gradient of micro-batch 3 of 3; that of 1, 2 is lost, as after a zero_grad() between "
        "them; weights of the micro-batches' own gradients: 0, 0, 1"
    )


SHARPNESS = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.randn(12, 5).tensor_split(world)[rank]
    for attempt in range(2):  # the second gradient is that of moved weights, for the same samples
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= world
            weight.data += (0.01 if attempt == 0 else -0.01)
    optimizer.step()
"""


def test_calls_with_the_same_samples_are_no_micro_batches(tmp_path):
    """A program that differentiates twice at the same samples is left untested by `--all`, and refused by `auto`."""
    path = tmp_path / "sharpness.py"
    path.write_text(SHARPNESS)
    report = verify_program(str(path), 2, all_relations=True, upcast=False, logged=False)
    assert report.verdict.equal
    assert [case.title for case in report.hardened] == ["data"]
    assert report.hardened[0].skipped == "the program trains with no sample of a data loader of PyTorch"
    assert report.untested[0].startswith(
        "whether micro-batches train like one batch (the script calls its model 2 times before"
    )
    with pytest.raises(InputError) as caught:
        verify_program(str(path), 2, accumulate=("auto",), upcast=False, logged=False)
    assert str(caught.value) == (
        f"--accumulate auto: no option of {path} was found that makes it process the batch of a step at once; give the "
        "arguments that do, such as --accumulate '--accum 1'"
    )


def test_a_function_has_no_options(script):
    """`auto` needs a script."""
    with pytest.raises(InputError) as caught:
        verify_program(len, 2, platform="torch", accumulate=("auto",))
    assert str(caught.value) == "--accumulate auto reads the options of a script; len is a function"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--accum", "4"], [["--accum", "1"]]),
        (["--accum=4", "--batch", "6"], [["--accum=1", "--batch", "6"], ["--accum=1", "--batch", "24"]]),
        (["train.accum_steps=2", "data.batch=3"], [["train.accum_steps=1", "data.batch=3"],
                                                   ["train.accum_steps=1", "data.batch=6"]]),
        (["--accum", "1", "--batch", "6"], []),
        (["--accumulate", "--batch", "6"], []),
        (["4", "--name=b", "-x"], []),
    ],
)  # fmt: skip
def test_candidates_are_read_from_the_arguments(tmp_path, arguments, expected):
    """The number of micro-batches becomes 1; then each size of a batch is multiplied, in every spelling of options."""
    (tmp_path / "plain.py").write_text("import torch\n")
    program = Program("plain.py", str(tmp_path / "plain.py"), "", tuple(arguments))
    assert list(candidate_arguments(program)) == expected

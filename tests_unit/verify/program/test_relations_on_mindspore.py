"""Relations of programs and the comparison of two runs, on MindSpore: resumed, accumulated, logged, other ranks."""

import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide

pytestmark = pytest.mark.platforms("mindspore")

SCRIPT = """
import argparse
import numpy as np
import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

options = argparse.ArgumentParser()
options.add_argument("--resume", action="store_true")
options.add_argument("--lost", action="store_true")
options.add_argument("--accum", type=int, default=1)
options.add_argument("--local", action="store_true")
options.add_argument("--decay", type=float, default=0.0)
given = options.parse_args()

init()
rank, world = get_rank(), get_group_size()
ms.set_seed(0)
net = nn.Dense(4, 3)
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, weight_decay=given.decay)
kept = [*net.get_parameters(), *optimizer.moments]
start = 0
if given.resume:
    saved = ms.load_checkpoint("saved.ckpt")
    for parameter in list(net.get_parameters()) if given.lost else kept:
        parameter.set_data(saved[parameter.name])
    start = int(saved["done"].asnumpy())
reduce = nn.DistributedGradReducer(optimizer.parameters, mean=True)
value_and_grad = ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, optimizer.parameters)
data = np.random.default_rng(0)
batches = [[data.normal(size=(12, size)).astype(np.float32) for size in (4, 3)] for _ in range(4)]
for step in range(start, 4):
    rows = np.arange(12).reshape(given.accum, -1)
    sums, losses = None, []
    for part in rows:
        own = np.array_split(part, world)[rank]
        loss, gradients = value_and_grad(*(ms.Tensor(array[own]) for array in batches[step]))
        sums = gradients if sums is None else [one + other for one, other in zip(sums, gradients)]
        losses.append(float(loss))
    sums = tuple(each / given.accum for each in sums)
    optimizer(sums if given.local else reduce(sums))
    if rank == 0:
        print(f"step {step} mean {sum(losses) / len(losses):.6f}")
        named = [{"name": each.name, "data": each} for each in kept]
        ms.save_checkpoint([*named, {"name": "done", "data": ms.Tensor(step + 1)}], "saved.ckpt")
"""


@pytest.fixture
def script(tmp_path):
    """The script, in a folder of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_a_script_is_resumed_and_accumulates(script):
    """Started again it goes on as before, and three micro-batches give the gradient of one batch."""
    report = verify_program(
        script, 2, args=["--accum", "3"], resume=["--accum", "3", "--resume"], accumulate=["--accum", "1"],
        allow=["equal-data", "even-dims"],
    )  # fmt: skip
    assert report.status == 0, report.text()
    assert [case.title for case in report.hardened] == ["accumulate", "resume"]
    assert all(case.verdict.counts["weight"] for case in report.hardened)


def test_a_lost_optimizer_state_is_found(script):
    """Without its momentum the second start differs, first in the optimizer's state."""
    report = verify_program(script, 2, resume=["--resume", "--lost"], allow=["equal-data", "even-dims"])
    first = next(case.verdict.first for case in report.hardened if case.title == "resume")
    assert (report.status, first.kind, first.cause.kind) == (1, "state", "not-restored"), report.text()


def test_runs_on_other_ranks_are_compared(script):
    """Two and three ranks differ in the order of sums alone; another weight decay is another computation."""
    report = verify_diff(DiffSide(script, world_size=2), DiffSide(script, world_size=3))
    assert (report.status, report.kind_of_difference) == (0, "order of sums"), report.text()
    report = verify_diff(DiffSide(script), DiffSide(script, ["--decay", "0.1"], 2))
    assert (report.status, report.kind_of_difference) == (1, "another computation"), report.text()
    assert report.verdict.first.kind in ("state", "weight")

"""`--logged`: numbers that rank 0 logs are the single device's to the digits shown; times and settings never alarm."""

import numpy as np
import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.program.logged import logged_numbers
from hyper_parallel.verify.program.printed import PRINTED, WRITTEN, written_lines

pytestmark = pytest.mark.platforms("torch")

SCRIPT = """
import json, logging, math, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

logs = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 5))
if world > 1:
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
started, total, seen = time.perf_counter(), 0.0, 0
logging.basicConfig(level=logging.INFO)
file = open("log.jsonl", "w") if rank == 0 else None
print(f"version 2.13.0, world {world}, share {1 / world:.4f}, parameters {sum(p.numel() for p in model.parameters())}")
for step in range(3):
    x, y = torch.randn(12, 7), torch.randn(12, 5)
    own = [value.tensor_split(world)[rank] for value in (x, y)]
    loss = nn.functional.mse_loss(model(own[0]), own[1])
    loss.backward()
    local = sum((p.grad.to_local() if world > 1 else p.grad).square().sum() for p in model.parameters())
    squares = local.clone()
    dist.all_reduce(squares)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    total += loss.item()
    seen += len(own[0])
    lines = {
        "right": f"step {step}: loss {mean:.4f} norm {squares.sqrt():.3e} ppl {mean.exp():.3f}",
        "local-norm": f"step {step}: norm {local.sqrt():.5f}, loss {mean:.4f}",
        "summed-loss": f"loss={mean * world:.5f} step={step}",
        "local-loss": f"{step} loss: {loss:.6f} mean: {total / (step + 1):.4f} ppl: {math.exp(loss):.3f}",
        "costs": f"{time.perf_counter() - started:.4f} s, {seen / 7:.3f} samples, {step / 3 + world:.3f} GB, elapsed "
        f"{time.perf_counter():.2f}, 1.234it/s, step_time={0.1 * (1 + world) + step:.4f}",
        "unknown": f"spread {local * (step + 1.5):.4f}",
        "file": "",
        "logging": "",
    }
    if rank == 0 and lines[logs]:
        print(lines[logs])
    if rank == 0 and logs == "logging":
        logging.info("loss %.5f, norm %.4f", mean, local.sqrt())
    if rank == 0 and logs == "file":
        file.write(json.dumps({"step": step, "norm": float(local.sqrt()), "loss": float(mean)}) + chr(10))
        file.flush()
"""


@pytest.fixture
def script(tmp_path):
    """A sharded script that logs in several ways."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize("world, logs, compared", [
    (2, "right", 9), (3, "local-loss", 0),
    pytest.param(4, "costs", 0, marks=pytest.mark.sweep),  # which numbers are costs: tested without a run below
])  # fmt: skip
def test_right_logs_are_no_alarm(script, world, logs, compared):
    """Global numbers are equal, rank 0's own loss is noted, and times, counts and settings are not compared."""
    report = verify_program(script, world, args=[logs], logged=True)
    assert report.ok, report.text()
    assert [case.verdict.counts["logged"] for case in report.hardened] == [compared] * bool(compared)
    if logs == "local-loss":
        notes = [note for note in report.verdict.notes if note.startswith("logged")]
        assert len(notes) == 3
        assert notes[0].startswith(
            "logged '# loss: # mean: # ppl: #', number 2: rank 0 logs the loss of its own samples"
        )


@pytest.mark.parametrize(
    "world, logs, kind, name",
    [
        # By print, which the scaled loss shows as well; the norm's cause is shown by the file.
        pytest.param(2, "local-norm", "norm-local", "'step #: norm #, loss #', number 2", marks=pytest.mark.sweep),
        (3, "summed-loss", "scaled-by-size", "'loss=# step=#', number 1"),
        (2, "file", "norm-local", """'{"step": #, "norm": #, "loss": #}', number 2, in log.jsonl"""),
        (2, "logging", "norm-local", "'INFO:root:loss #, norm #', number 2"),
    ],
)
def test_a_logged_number_of_one_rank_is_found(script, world, logs, kind, name):
    """Training is equal, and the number that is logged is another one: by print, logging, or a file of JSON lines."""
    report = verify_program(script, world, args=[logs])
    assert report.verdict.equal
    assert report.status == 1
    verdict = report.hardened[0].verdict
    assert [(each.name, each.cause.kind, each.ranks, each.step) for each in verdict.differences] == [
        (name, kind, (0,), 0)
    ]
    assert (kind != "norm-local") or "is the norm of the gradients that rank 0 holds" in verdict.first.cause.evidence
    if logs == "file":
        assert verify_program(script, world, args=[logs], logged=False).ok


def test_a_number_that_nothing_explains_counts_on_request(script):
    """By default it is listed; with --logged it is an error."""
    listed = verify_program(script, 2, args=["unknown"])
    assert listed.ok
    assert listed.hardened == []
    (note,) = [each for each in listed.verdict.notes if each.startswith("logged")]
    assert note.startswith("logged 'spread #', number 1: rank 0 logs ")
    assert note.endswith("; nothing explains it, it may be a number of rank 0's own part")
    strict = verify_program(script, 2, args=["unknown"], logged=True)
    assert (strict.status, strict.hardened[0].verdict.first.cause.kind) == (1, "unexplained")


def test_numbers_of_lines_are_aligned_by_the_text_around_them():
    """Integers, versions and dates are no decimal numbers; a unit in front of a number or behind it marks a cost."""
    lines = [(0, "step 1 loss 0.50 v2.13.0 1e-3"), (1, "step 2 loss 0.25 v2.13.0 1e-3"), (2, "took 1.5 then 2.25ms")]
    numbers = logged_numbers({PRINTED: lines, WRITTEN: {"a.csv": [(-1, "7,1.250,+2.5E+1")]}})
    found = {key: (number.value, number.digits, number.cost) for key, number in numbers.items()}
    text = "step # loss # v2.13.0 #"
    assert found["", text, 0, 1] == (0.5, 2, False)
    assert found["", text, 1, 1] == (0.25, 2, False)
    assert found["a.csv", "#,#,#", 0, 1] == (1.25, 4, False)
    assert found["a.csv", "#,#,#", 0, 2] == (25.0, 2, False)
    assert {number.value for number in numbers.values() if number.cost} == {1.5, 2.25}
    assert np.isclose([number.unit for number in numbers.values() if number.value == 25.0], 1.0)


def test_lines_of_text_files_are_read_and_other_files_are_not(tmp_path):
    """What a run wrote is read by the suffix of its name, in any folder."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log.jsonl").write_text("a" + chr(10) + chr(10) + "b" + chr(10))
    (tmp_path / "last.pt").write_bytes(b"0.5")
    assert written_lines(tmp_path) == {"runs/log.jsonl": [(-1, "a"), (-1, "b")]}

"""Recordings of MindSpore's programs: what is written, compared with each other, with programs, and with PyTorch's."""

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.verify import record_run, simulate
from hyper_parallel.verify.diff.recordings import compare_recordings
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.frameworks.contract.fingerprint import fingerprint_of
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.sink import RECORDED
from hyper_parallel.verify.recording.stored import read_recording

pytestmark = pytest.mark.platforms("mindspore")

SCRIPT = """
import sys
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn, ops

variant = sys.argv[1] if len(sys.argv) > 1 else ""
rank, world = 0, 1
if "alone" not in sys.argv:
    ms.communication.init()
    rank, world = ms.communication.get_rank(), ms.communication.get_group_size()
random = np.random.default_rng(5)
step = 0


class Middle(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.zeros((17, 17), np.float32)))

    def construct(self, x):
        if variant == "order":
            y = ops.matmul(x[:, 9:], self.weight[9:]) + ops.matmul(x[:, :9], self.weight[:9])
        else:
            y = ops.matmul(x, self.weight)
        if variant == "bug" and step >= 1:
            y = y * 1.001
        return ops.tanh(y)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.into, self.middle, self.out = nn.Dense(9, 17), Middle(), nn.Dense(17, 3)
        self.drop = nn.Dropout(p=0.0)
        self.register_buffer("count", Tensor(2.0))

    def construct(self, x):
        return self.out(self.drop(self.middle(self.into(x))))


net = Net()
for parameter in net.get_parameters():
    parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) / 4))
optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
differentiated = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
for step in range(3):
    x = random.normal(size=(6, 9)).astype(np.float32)[rank::world]
    loss, gradients = differentiated(Tensor(x))
    if world > 1:
        gradients = tuple(ops.AllReduce()(gradient) / world for gradient in gradients)
    optimizer(ops.clip_by_global_norm(gradients, 1.0))
ms.save_checkpoint(net, sys.argv[3]) if len(sys.argv) > 3 else None
"""

SCRIPT_OF_TORCH = """
import numpy as np
import torch
from torch import nn

random = np.random.default_rng(5)


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(17, 17))

    def forward(self, x):
        return torch.tanh(x @ self.weight) * FACTOR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.MIDDLE, self.out = nn.Linear(9, 17), Middle(), nn.Linear(17, 3)
        self.register_buffer("count", torch.tensor(2.0))

    def forward(self, x):
        return self.out(self.MIDDLE(self.into(x)))


net = Net()
for parameter in net.parameters():
    parameter.data = torch.from_numpy(random.normal(size=parameter.shape).astype(np.float32) / 4)
optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9)
for step in range(3):
    x = torch.from_numpy(random.normal(size=(6, 9)).astype(np.float32))
    optimizer.zero_grad()
    (net(x) ** 2).mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    """The script's path."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(script, folder, *arguments, platform="mindspore", **options):
    """Record a script in this process, on its rank; without a folder it only runs."""
    argv, sys.argv = sys.argv, [str(script), *arguments]
    block = contextlib.nullcontext() if folder is None else record_run(folder, platform=platform, **options)
    try:
        with block:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv


@pytest.fixture
def record(tmp_path, script):
    """A function that records the script with arguments, on simulated ranks, and returns the folder."""

    def recorded(name, *arguments, ranks=1, **options):
        folder = tmp_path / name
        if ranks == 1:
            run(script, folder, *(arguments or [""]), "alone", **options)
        else:
            simulate(lambda: run(script, folder, *arguments, **options), ranks, "mindspore")
        return folder

    return recorded


def test_a_step_of_mindspore_is_recorded(record):
    """Inputs, outputs, losses, norms, gradients, rates, weights and buffers of each step are there, as of PyTorch."""
    before = os.environ.get("MS_JIT")
    recording = read_recording(record("a", whole=["middle*"]), "A")
    assert os.environ.get("MS_JIT") == before
    found = {record.key: record for record in recording.ranks[0].records.records}
    of_step = {(kind, name) for kind, name, step, call in found if step == 1 and call == 0}
    weights = ["into.weight", "into.bias", "middle.weight", "out.weight", "out.bias"]
    assert of_step == {
        ("input", "[0]"), *(("output", name) for name in ("into", "middle", "drop", "out", "(model)")),
        ("loss", "loss"), ("norm", "gradient norm"), ("rate", "optimizer 0, group 0"), ("buffer", "count"),
        *(("gradient", name) for name in weights), *(("weight", name) for name in weights),
    }  # fmt: skip
    assert {kind for kind, *_ in found} <= set(RECORDED)
    assert recording.framework == "mindspore"
    assert recording.ranks[0].end["optimizers"] == ["Momentum"]
    whole = found["weight", "middle.weight", 2, 0].value
    assert whole.whole.shape == (17, 17)
    assert np.array_equal(fingerprint_of(whole.whole).numbers, whole.numbers)


def test_recording_changes_no_weight(script, tmp_path):
    """A recorded program of MindSpore computes what it computes alone, bit for bit."""
    import mindspore as ms

    run(script, None, "", "alone", str(tmp_path / "plain.ckpt"))
    run(script, tmp_path / "a", "", "alone", str(tmp_path / "recorded.ckpt"))
    plain, recorded = (ms.load_checkpoint(str(tmp_path / f"{name}.ckpt")) for name in ("plain", "recorded"))
    assert len(plain) >= 5
    assert all(np.array_equal(value.asnumpy(), recorded[name].asnumpy()) for name, value in plain.items())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_recording_of_ranks_and_its_program(record, script, ranks):
    """Recorded ranks are equal to the program's simulated ones; a seeded bug is named with its module and step."""
    right = verify_diff(DiffSide(str(record("a", ranks=ranks))), DiffSide(str(script)))
    assert right.status == 0, right.text()
    assert right.verdict.counts["gradient"] == ranks * 3 * 5
    assert right.platforms == ("mindspore", "mindspore")
    wrong = verify_diff(DiffSide(str(record("bug", "bug", ranks=ranks))), DiffSide(str(script)))
    assert (wrong.status, wrong.kind_of_difference) == (1, "another computation"), wrong.text()
    assert (wrong.verdict.first.name, wrong.verdict.first.step) == ("middle", 1)


def test_two_recordings_of_mindspore(record):
    """Another order of sums is no difference between recordings, a bug is; all elements are compared, too."""
    first, order, bug = (record(name, name, whole=["*"]) for name in ("plain", "order", "bug"))
    report = compare_recordings(first, order)
    assert (report.status, report.kind_of_difference) == (0, "order of sums"), report.text()
    report = compare_recordings(order, bug)
    assert (report.verdict.first.name, report.verdict.first.step) == ("middle", 1), report.text()


def test_graph_mode_is_recorded_uncompiled(script, tmp_path):
    """A program that asks for graph mode runs as it is written, and the recording says so."""
    script.write_text(SCRIPT.replace("rank, world = 0, 1", "ms.set_context(mode=ms.GRAPH_MODE); rank, world = 0, 1", 1))
    run(script, tmp_path / "a", "alone")
    recording = read_recording(tmp_path / "a", "A")
    assert len([each for each in recording.ranks[0].records.records if each.kind == "output"]) == 3 * 5
    assert recording.notes() == ["A: compiled functions ran uncompiled, since their modules were recorded"]


def test_the_scheduler_of_msrun_records_nothing(tmp_path, monkeypatch):
    """The process beside the ranks, which runs the script to the point where they meet, writes no file."""
    for name, value in (("ROLE", "MS_SCHED"), ("WORKER_NUM", "2"), ("SCHED_HOST", "127.0.0.1"), ("SCHED_PORT", "1")):
        monkeypatch.setenv(f"MS_{name}", value)
    with record_run(tmp_path / "a", platform="mindspore"):
        pass
    assert not (tmp_path / "a").exists()


def test_half_precision_is_written_as_float32():
    """Tensors of the program are read on the host: bfloat16 by its own name, with the numbers of its elements."""
    import mindspore as ms

    from hyper_parallel.platform.select import platform_named
    from hyper_parallel.verify.frameworks import harness_of

    fingerprints = harness_of(platform_named("mindspore")).fingerprints()
    values = np.random.default_rng(7).normal(size=(5, 3)).astype(np.float32)
    tensor = ms.Tensor(values).astype(ms.float16)
    assert fingerprints.dtype(tensor) == "float16"
    assert np.array_equal(fingerprints.array(tensor), values.astype(np.float16).astype(np.float32))
    assert fingerprints.numbers([fingerprints.of(tensor)]) == [
        fingerprint_of(values.astype(np.float16).astype(np.float32)).numbers.tolist()
    ]
    assert fingerprints.world() is None


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_a_recording_of_pytorch_and_one_of_mindspore(record, tmp_path):
    """One training in both frameworks is equal but for rounding; a wrong factor is named; other names are refused."""
    mindspore = record("a")
    script = tmp_path / "torch_train.py"

    def of_torch(name, factor="1", middle="middle"):
        script.write_text(SCRIPT_OF_TORCH.replace("FACTOR", factor).replace("MIDDLE", middle))
        run(script, tmp_path / name, platform="torch")
        return tmp_path / name

    report = compare_recordings(mindspore, of_torch("right"))
    assert (report.status, report.platforms) == (0, ("mindspore", "torch")), report.text()
    assert report.verdict.counts["gradient"] >= 3 * 5
    report = compare_recordings(mindspore, of_torch("wrong", "1.001"))
    assert (report.status, report.verdict.first.name) == (1, "middle"), report.text()
    for rank in (tmp_path / "right").glob("rank-*.jsonl"):
        parsed = [json.loads(line) for line in rank.read_text().splitlines()]
        for line in parsed:
            line["name"] = line.get("name", "") and f"net.{line['name']}"
        (tmp_path / "named").mkdir()
        (tmp_path / "named" / Path(rank).name).write_text("".join(json.dumps(line) + "\n" for line in parsed))
    with pytest.raises(InputError, match=r"share no parameter and no recorded value.*into\.bias"):
        compare_recordings(mindspore, tmp_path / "named")

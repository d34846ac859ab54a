"""Logs of PyTorch's DebugMode compared: true ones of small programs, and lines that no log has."""

import re

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.diff.recordings import compare_recordings
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.frameworks.contract.fingerprint import CHOSEN, NORM
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.debug_mode import read_log
from hyper_parallel.verify.recording.stored import read_recording

torch = pytest.importorskip("torch")
debug_mode = pytest.importorskip("torch.utils._debug_mode")
pytestmark = pytest.mark.platforms("torch")


class Scaled(torch.nn.Module):
    """A layer that multiplies; ``scale`` seeds a bug, ``order`` adds up in another order."""

    def __init__(self, scale, order):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 33))
        self.scale, self.order = scale, order

    def forward(self, x):
        """Return the product, scaled."""
        y = x @ self.weight.T if not self.order else x.double().flip(1) @ self.weight.double().flip(1).T
        return y.float() * self.scale


def log_of(path, *, hash_fn="norm", steps=1, scale=1.0, order=False, **options):
    """Write the log of a few training steps on CPU; returns its path."""
    hashes = {"hash_fn": hash_fn, "hash_inputs": options.pop("hash_inputs", False)}
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), Scaled(scale, order), torch.nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(3, 7)
    options = {"record_nn_module": True, **options}
    with debug_mode.DebugMode(**options) as mode, mode.log_tensor_hashes(**hashes):
        for _ in range(steps):
            optimizer.zero_grad()
            first, second = model(x).split([1, 2])
            (first.sum() + second.pow(2).sum()).backward()
            optimizer.step()
    path.write_text(mode.debug_string())
    return path


@pytest.mark.parametrize("hash_fn", ["norm", "hash_tensor", ["norm", "hash_tensor"]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hash_inputs": True, "record_ids": True, "record_stack_trace": True},
        {"record_nn_module": False},
        {"record_output": False, "hash_inputs": True},
    ],
)
def test_equal_runs_and_a_bug(tmp_path, hash_fn, options):
    """Equal logs have status 0. A scale of 1.01 is found at its operator; by hashes of bits alone it is not judged."""
    a = log_of(tmp_path / "a.log", hash_fn=hash_fn, **options)
    report = compare_recordings(a, log_of(tmp_path / "b.log", hash_fn=hash_fn, **options))
    assert (report.status, report.kind_of_difference) == (0, "none"), report.text()
    assert report.verdict.counts["call"] == len(read_log(a, "A").records.records) > 30
    assert "a log of DebugMode has a hash of what each operator got and returned" in report.text()
    report = compare_recordings(a, log_of(tmp_path / "bug.log", hash_fn=hash_fn, scale=1.01, **options))
    where = " in Sequential.2" if options.get("record_nn_module", True) else ""
    name = f"result of aten::mul.Tensor{where}"
    if hash_fn == "hash_tensor":
        assert (report.status, report.first_bits) == (3, f"fingerprints differ first in step 1 in {name}")
        words = f"the first in step 1 in {name}, have other bits and could not be judged: the logs have only hashes"
        assert words in report.text()
        return
    first = report.verdict.first
    assert (report.status, first.kind, first.name, first.module) == (1, "call", name, where.removeprefix(" in "))
    assert first.error == pytest.approx(0.01, rel=1e-3)
    assert bool(re.fullmatch(r"test_debug_logs\.py:\d+", first.site)) == ("record_stack_trace" in options)


def test_another_order_of_sums_is_no_bug(tmp_path):
    """Sums in another order stay within rounding, and calls of one run alone are listed; no update is judged."""
    a = log_of(tmp_path / "a.log", hash_inputs=True)
    report = compare_recordings(a, log_of(tmp_path / "b.log", hash_inputs=True, order=True))
    assert report.kind_of_difference == "order of sums", report.text()
    assert "argument 0 of aten::flip in Sequential.2" in report.text()
    assert "only B has it" in report.text()
    assert report.status == 3
    assert "bits had differed before the first update, and an update may magnify rounding to any size" in report.text()
    assert all(each.step == 0 for each in report.verdict.differences)


def test_a_call_more_is_aligned(tmp_path):
    """A run that makes a step more has its calls in that step alone: all steps that both have are compared."""
    report = compare_recordings(log_of(tmp_path / "a.log"), log_of(tmp_path / "b.log", steps=2))
    assert (report.status, report.steps) == (0, 2), report.text()
    assert "steps that only B has: step 3" in report.text()


def test_numbers_of_a_line(tmp_path):
    """Norms, bits, several tensors, values that are not finite and kernels are read; other hashes are counted."""
    path = tmp_path / "x.txt"
    path.write_text(
        "  [record function] Optimizer.step#SGD.step\n"
        "    [inductor region (compile)] enter\n"
        "    aten::topk(t: bf16[4, 9], 2)  ->  ('t: bf16[4, 4]', 't: i64[4, 4]')  # {'hash': ((8.0, 5), (nan, 7))}\n"
        "    aten::any(t: b8[2])  ->  t: b8[]  # {'hash': tensor(1)}\n"
        "    aten::item(t: f32[])  ->  1.0  # {'hash': None}\n"
        "    [triton] triton_poi_0(in_ptr0=t: f32[3, 4], xnumel=12)\n"
        "      # pre-kernel hashes: {in_ptr0: 12.0}\n"
        "      # post-kernel hashes: {in_ptr0: 24.0, out: 18446744073709551615}\n\n"
        "    redistribute_input [implicit] (1, S(0) -> R)\n"
        "    -> output: R\n"
    )
    found = read_log(path, "A", 1, 2)
    values = {record.name: record.value for record in found.records.records}
    one = values["result 0 of aten::topk"]
    assert (one.shape, one.dtype, one.norm, one.numbers[CHOSEN.start + 1]) == ((4, 4), "bfloat16", 2.0, 5)
    assert np.isnan(values["result 1 of aten::topk"].norm)
    assert values["argument in_ptr0 of triton_poi_0"].shape == (3, 4)
    assert values["argument in_ptr0 of triton_poi_0, after it"].norm == pytest.approx(24 / 12**0.5)
    assert list(values["argument out of triton_poi_0, after it"].numbers[CHOSEN][:2]) == [2**32 - 1, 2**32 - 1]
    assert values["argument out of triton_poi_0, after it"].known == (CHOSEN.start, CHOSEN.start + 1)
    assert one.known == (NORM, CHOSEN.start, CHOSEN.start + 1)
    assert found.end["left out"] == {"tensors whose hash is neither a number nor several": 1}
    assert {record.step for record in found.records.records} == {1}


def test_ranks_of_a_folder(tmp_path):
    """A folder with a log for each rank is one recording; a bug on one rank is found there."""
    for name, scale in (("a", 1.0), ("b", 0.97)):
        (tmp_path / name).mkdir()
        for rank in range(3):
            log_of(tmp_path / name / f"rank-{rank}.log", scale=scale if rank == 1 else 1.0)
    report = compare_recordings(tmp_path / "a", tmp_path / "b")
    assert (report.status, report.verdict.first.ranks) == (1, (1,))
    assert f"log of DebugMode {tmp_path / 'a'}, 3 ranks" in report.text()
    (tmp_path / "b" / "rank-1.log").unlink()
    message = (
        f"B: {tmp_path / 'b'} has 2 of the files of 3 ranks; missing: rank-1.jsonl; ranks on other hosts wrote theirs "
        "there: copy them into one folder"
    )
    with pytest.raises(InputError, match=re.escape(message.replace("rank-1.jsonl", "rank-1.log"))):
        read_recording(tmp_path / "b", "B")


def test_what_is_no_log_is_refused(tmp_path, capsys):
    """Text that is no log, bytes, logs without hashes, and a log against a program or a recording are named."""
    path = tmp_path / "x.log"
    path.write_text("epoch 1: loss 0.5\n")
    message = (
        f"A: {path}, line 1, is not from a log of DebugMode: 'epoch 1: loss 0.5'; write what "
        "debug_mode.debug_string() returns to the file, and nothing else"
    )
    assert main(["verify", "diff", str(path), str(path)]) == 2
    assert message in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="bytes that are not text"):
        read_log(path, "A")
    path.write_text("  aten::mm(t: f32[3, 4], t: f32[4, 5])  ->  t: f32[3, 5]\n")
    with pytest.raises(InputError, match="without hashes of tensors, so there is nothing to compare"):
        read_log(path, "A")
    log_of(path)
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    message = f"A: {path} is a log of DebugMode, which has operators, and the other run's records have modules"
    with pytest.raises(InputError, match=re.escape(message)):
        verify_diff(DiffSide(str(path)), DiffSide(str(script)))
    (tmp_path / "dump" / "step0" / "rank0").mkdir(parents=True)

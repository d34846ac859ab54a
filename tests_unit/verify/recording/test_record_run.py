"""Recording: what is written while a program trains, what is left out, and what a killed process leaves."""

import json
import os
import runpy
import subprocess
import sys
import types

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify import record_run, simulate
from hyper_parallel.verify.diff.recordings import compare_recordings
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.frameworks.contract.records import RecordingError
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.sink import RECORDED
from hyper_parallel.verify.recording.stored import read_recording

pytestmark = pytest.mark.platforms("torch")


TRAINS = """
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
"""


def lines(folder, rank=0):
    """The lines of a rank's file."""
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def records(folder):
    """The records of rank 0, by kind, name, step and call."""
    return {record.key: record for record in read_recording(folder, "A").ranks[0].records.records}


def test_everything_of_a_step_is_recorded(record):
    """Inputs, outputs, losses, gradients, norms, rates, weights and buffers of a step, and a header with the world."""
    folder = record("a")
    found = records(folder)
    of_step = {(kind, name) for kind, name, step, call in found if step == 1 and call == 0}
    weights = ["into.weight", "into.bias", "middle.weight", "out.weight", "out.bias"]
    assert of_step == {
        ("input", "[0]"), ("input", "['keep']"),
        *(("output", name) for name in ("into", "middle", "out", "(model)")),
        ("loss", "loss"), ("norm", "gradient norm"), ("rate", "optimizer 0, group 0"), ("buffer", "count"),
        *(("gradient", name) for name in weights), *(("weight", name) for name in weights),
    }  # fmt: skip
    assert {kind for kind, *_ in found} <= set(RECORDED)
    header, *_, end = lines(folder)
    assert (header["recording"], header["rank"], header["world_size"], header["dtype"]) == (2, 0, 1, "float32")
    assert header["framework"].startswith("torch ")
    assert end == {"end": {"by": "the end of the block", "steps": 3, "left out": {}, "optimizers": ["AdamW"]}}
    assert found["loss", "loss", 0, 0].site.startswith(str(folder.parent / "train.py"))


def test_a_recorded_program_computes_what_it_computes_alone(record):
    """Recording changes no value and no random number: weights are equal bit for bit with and without it."""
    import torch

    def train(block):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(7, 2)
        )
        optimizer = torch.optim.Adam(model.parameters())
        with block:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 5)).square().sum().backward()
                optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    import contextlib

    plain, recorded = train(contextlib.nullcontext()), train(record_run(record("a").parent / "b"))
    assert all(torch.equal(*pair) for pair in zip(plain, recorded, strict=True))


def test_steps_that_are_not_recorded_are_listed(record):
    """`steps` ends the recording and not the program; `every` leaves steps out; the end says what was left out."""
    folder = record("a", "--steps", "5", steps=2)
    assert {step for _, _, step, _ in records(folder)} == {-1, 0, 1}
    assert lines(folder)[-1]["end"]["left out"] == {"steps after the first 2": 1}
    folder = record("b", "--steps", "5", every=2)
    assert {step for _, _, step, _ in records(folder)} == {-1, 0, 2, 4}
    assert list(lines(folder)[-1]["end"]["left out"]) == ["steps other than one in 2"]


def test_the_file_stays_under_its_limit(record):
    """A byte limit ends the recording with whole lines and says so; the program goes on."""
    folder = record("a", "--steps", "60", limit=1 << 16)
    assert (folder / "rank-0.jsonl").stat().st_size <= 1 << 16
    end = lines(folder)[-1]["end"]
    assert list(end["left out"]) == ["all after the limit of 65536 bytes"]
    assert read_recording(folder, "A").notes() == ["A: not recorded: all after the limit of 65536 bytes"]


def test_whole_tensors_on_request(record):
    """Tensors whose names match a pattern are there with all elements, half precision as float32."""
    folder = record("a", "--dtype", "bfloat16", whole=("middle*", "loss"))
    whole = {key[:2]: record.value.whole for key, record in records(folder).items() if record.value.whole is not None}
    assert set(whole) == {
        ("output", "middle"), ("weight", "middle.weight"), ("gradient", "middle.weight"), ("loss", "loss")
    }  # fmt: skip
    value = records(folder)["weight", "middle.weight", 2, 0].value
    assert (value.dtype, value.whole.dtype, value.whole.shape) == ("bfloat16", np.float32, (17, 17))
    assert np.linalg.norm(value.whole) == pytest.approx(value.norm, rel=1e-6)


def test_how_the_program_ended_is_recorded(record, tmp_path):
    """An exception passes through and is named; sys.exit(0) is an end like any other."""
    with pytest.raises(KeyError), record_run(tmp_path / "a"):
        raise KeyError("x")
    assert lines(tmp_path / "a")[-1]["end"]["by"] == "KeyError"
    for code, words in ((0, "the end of the block"), (3, "sys.exit(3)")):
        with pytest.raises(SystemExit), record_run(tmp_path / f"exit-{code}"):
            sys.exit(code)
        assert lines(tmp_path / f"exit-{code}")[-1]["end"]["by"] == words


def test_a_folder_with_a_recording_is_refused(record, tmp_path):
    """An earlier recording is not overwritten, nor is a file; both are said before a step is lost."""
    folder = record("a")
    with pytest.raises(RecordingError) as error, record_run(folder):
        pass
    path = folder / "rank-0.jsonl"
    assert str(error.value) == f"{path} is there already: record into another folder, or delete the earlier recording"
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="file cannot be made: File exists"), record_run(tmp_path / "file"):
        pass


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps is 0; it must be an integer of at least 1"),
        ({"every": 1.5}, "every is 1.5; it must be an integer of at least 1"),
        ({"limit": 10}, "limit is 10; it must be an integer of at least 65536"),
        ({"every": True}, "every is True; it must be an integer of at least 1"),
        ({"platform": "jax"}, "platform is 'jax'; it must be torch or mindspore"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    """Numbers out of range are refused by name."""
    with pytest.raises(RecordingError) as error, record_run(tmp_path / "a", **options):
        pass
    assert str(error.value) == message


def test_a_recording_inside_a_verification_records_nothing(tmp_path):
    """A program that records itself can be verified: the block does nothing then."""
    from hyper_parallel.verify.frameworks.contract.record_log import RecordLog, use_log

    with use_log(RecordLog(0)), record_run(tmp_path / "a"):
        pass
    assert not (tmp_path / "a").exists()


def test_each_rank_has_its_own_file(tmp_path):
    """Simulated ranks that have joined PyTorch's world record side by side, in this process."""

    def train():
        import torch

        torch.distributed.init_process_group("gloo")
        with record_run(tmp_path / "a"):
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(2, 3) * (1 + torch.distributed.get_rank())).sum().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()

    simulate(train, 3, "torch")
    recording = read_recording(tmp_path / "a", "A")
    assert [rank.records.rank for rank in recording.ranks] == [0, 1, 2]
    collectives = [record for record in recording.ranks[1].records.records if record.kind == "collective"]
    assert [(record.name, record.call, record.value.shape) for record in collectives] == [
        ("all_reduce", 0, (2, 3)), ("all_reduce", 1, (2,))
    ]  # fmt: skip


def test_two_processes_of_which_one_is_killed(script, tmp_path, capfd):
    """Kill -9 in the middle of a step leaves the steps before on both ranks, which are compared elsewhere."""
    os.environ.pop("RANK", None)
    launch = ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    status = main(["record", "-o", str(tmp_path / "killed"), *launch, str(script), "--steps", "6", "--kill", "4"])
    assert status == 1
    assert main(["record", "-o", str(tmp_path / "ended"), "--steps", "5", "--json", *launch, str(script)]) == 0
    out = capfd.readouterr().out
    assert json.loads(out[out.index("{") :])["files"] == ["rank-0.jsonl", "rank-1.jsonl"]
    killed = read_recording(tmp_path / "killed", "A")
    assert killed.ranks[1].end is None
    assert {0, 1, 2} <= killed.steps <= {0, 1, 2, 3, 4}
    report = compare_recordings(tmp_path / "killed", tmp_path / "ended")
    assert (report.status, report.kind_of_difference) == (0, "none"), report.text()
    assert "did not end the recording: killed, or still running" in report.text()
    assert report.steps >= 3
    ran = verify_diff(DiffSide(str(tmp_path / "ended")), DiffSide(str(script), ("--steps", "5")), steps=3)
    assert ran.status == 0, ran.text()
    assert (ran.steps, ran.verdict.counts["gradient"]) == (3, 2 * 3 * 5)


def test_record_runs_python_and_refuses_other_commands(script, tmp_path, capfd):
    """A script keeps its arguments, its output and its status; what starts no Python is refused with the way out."""
    folder = tmp_path / "a"
    command = ["record", "-o", str(folder), "--", sys.executable, str(script), "--steps", "1"]
    assert main(command) == 0
    captured = capfd.readouterr()
    assert "trained" in captured.out
    assert f"{folder}: 1 rank recorded" in captured.err
    assert main(command) == 2
    err = capfd.readouterr().err
    assert "is there already: record into another folder" in err
    assert "nothing was recorded" in err  # the files are those of the first run
    assert main(["record", "-o", str(folder), "--", "deepspeed", "train.py"]) == 2
    assert (
        "'deepspeed' is not supported here; python, torchrun, msrun and accelerate launch are supported"
        in capfd.readouterr().err
    )
    assert main(["record", "-o", str(folder)]) == 2
    assert "there is no command to record; give it after --" in capfd.readouterr().err


def test_a_script_that_fails_before_it_trains(tmp_path, capfd):
    """Nothing was recorded then: the command says so, has the script's status, and the next run takes the folder."""
    script, folder = tmp_path / "train.py", tmp_path / "a"
    command = ["record", "-o", str(folder), "--", sys.executable, str(script)]
    for text, status in (
        ("import torch\nraise KeyError", 1),
        ("import torch\nprint(3)", 1),
        ("import sys, torch; sys.exit(7)", 7),
    ):
        script.write_text(text)
        assert main(command) == status
        err = capfd.readouterr().err
        assert (
            "nothing was recorded; rank-0.jsonl: the program trained nothing inside the recording, or failed before it"
            in err
        )
    assert main([*command[:3], "--json", *command[3:]]) == 7
    shown = json.loads(capfd.readouterr().out)
    assert (shown["ok"], shown["status"], shown["files"]) == (False, 7, [])
    script.write_text(f"import torch\n{TRAINS}")
    assert main(command) == 0
    assert "1 rank recorded" in capfd.readouterr().err


@pytest.mark.parametrize(
    "imports, options, platform",
    [
        ("import torch", {}, "torch"),
        ("import mindspore.nn", {}, "mindspore"),
        ("import torch, mindspore", {"platform": "torch"}, "torch"),
        ("from transformers import Trainer", {}, "torch"),
        ("import torch, mindspore", {}, "train.py imports both: say which one trains, as in"),
        ("import numpy", {}, "train.py imports neither: say which one trains, as in record_run(folder, platform="),
    ],
)
def test_the_framework_is_the_programs(tmp_path, monkeypatch, imports, options, platform):
    """Where both frameworks are there, the file with the block says which one is recorded, or the argument does."""
    from hyper_parallel.verify.recording import run

    monkeypatch.setattr(run, "chosen_framework", str)
    for name in ("torch", "mindspore"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, types.ModuleType(name)))
    script = tmp_path / "train.py"
    script.write_text(f"def unused():\n    {imports}\nwith record_run(folder, **options): pass\n")
    chosen = []
    monkeypatch.setattr(run, "platform_named", lambda name: chosen.append(name) or platform_named("torch"))

    def enter():
        runpy.run_path(str(script), {"record_run": record_run, "folder": tmp_path / "a", "options": options})

    if platform in ("torch", "mindspore"):
        enter()
        assert chosen == [platform]
    else:
        with pytest.raises(RecordingError) as error:
            enter()
        assert platform in str(error.value)


def test_the_platform_option_chooses(tmp_path, capfd):
    """A script that imports both frameworks, or neither, is recorded by the one that the option names."""
    (tmp_path / "train.py").write_text(
        f"try:\n    import mindspore.none\nexcept ImportError:\n    import torch\n{TRAINS}"
    )
    command = ["record", "-o", str(tmp_path / "a"), "--", sys.executable, str(tmp_path / "train.py")]
    assert main([*command[:1], "--platform", "torch", *command[1:]]) == 0
    assert read_recording(tmp_path / "a", "A").header["framework"].startswith("torch ")


def test_damaged_recordings_are_refused(record, tmp_path):
    """A cut last line is dropped and said; damage elsewhere, other formats and missing ranks are errors."""
    folder = record("a")
    path = folder / "rank-0.jsonl"
    content = path.read_text().splitlines(keepends=True)

    def refused(text):
        path.write_text(text)
        with pytest.raises(InputError) as error:
            read_recording(folder, "B")
        return str(error.value)

    path.write_text("".join(content[:20]) + content[20][:30])
    recording = read_recording(folder, "B")
    assert recording.ranks[0].cut
    assert recording.notes()[0] == "B: the last record of rank 0 was cut off, and dropped"
    assert "line 3, is damaged: it is not a record" in refused(
        "".join([*content[:2], content[2][:-20] + "\n", *content[3:]])
    )
    assert "line 2, is damaged" in refused(content[0] + '{"kind": 3}\n')
    assert "is not a recording: its first line is not a header" in refused("x\n")
    assert "is not a recording: its first line is not a header" in refused("")
    header = json.loads(content[0])
    assert "is a recording of format 7, but this version" in refused(json.dumps({**header, "recording": 7}) + "\n")
    assert "its header has no rank and world size" in refused(json.dumps({**header, "rank": None}) + "\n")
    assert "has 1 of the files of 3 ranks; missing: rank-1.jsonl, rank-2.jsonl" in refused(
        json.dumps({**header, "world_size": 3}) + "\n" + content[1]
    )
    assert "has no record of rank 0: the program was killed before it trained" in refused(content[0])
    (folder / "rank-1.jsonl").write_text(json.dumps({**header, "rank": 1, "world_size": 2}) + "\n" + content[1])
    assert "has files of runs on 1 and 2 ranks" in refused("".join(content))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is a folder, but not a recording: it has no file rank-0"):
        read_recording(tmp_path / "empty", "A")


def test_the_process_of_a_rank_says_what_is_wrong(tmp_path):
    """The module that a launcher starts refuses a file that is not there, without a traceback."""
    words = [sys.executable, "-m", "hyper_parallel.verify.recording", json.dumps({"folder": str(tmp_path)}), "no.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().startswith("hyper-parallel record: error: FILE: there is no file")

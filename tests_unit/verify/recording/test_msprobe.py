"""Dumps of msprobe: what is read of them, what cannot be read, and what a dump's numbers are."""

import json
import pickle
import runpy
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.verify.frameworks.contract.fingerprint import LARGEST, LEAST, NORM, NOT_FINITE, SUM, fingerprint_of
from hyper_parallel.verify.frameworks.contract.harness import HarnessPlatform
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.msprobe import is_dump
from hyper_parallel.verify.recording.stored import read_recording

pytestmark = pytest.mark.platforms("torch")
DUMPS = runpy.run_path(str(Path(__file__).with_name("dumps.py")))
describe, training, write = DUMPS["describe"], DUMPS["training"], DUMPS["write"]
ENDS = (LEAST, LARGEST, NOT_FINITE)
NO_STATISTICS = "values of which the dump has no statistics, such as checksums alone, float8 or complex numbers"


def records(folder, rank=0):
    """What is read of a rank, by kind, name, step and call."""
    return {record.key: record for record in read_recording(folder, "A").run.ranks[rank].records}


def one(tmp_path, tensor, **more):
    """The fingerprint of one output."""
    write(tmp_path / "step0" / "rank0", {"Module.up.Linear.forward.0": {"output": [tensor], **more}})
    return records(tmp_path)["output", "up", 0, 0].value


def refused(folder):
    """The message with which a dump is refused."""
    with pytest.raises(InputError) as error:
        read_recording(folder, "A")
    return str(error.value)


def given(folder, name):
    """The folder of a dump that msprobe has written."""
    (folder / "step0" / "proc123").mkdir(parents=True)
    for kind, content in json.loads(Path(__file__).with_name(name).read_text()).items():
        (folder / "step0" / "proc123" / f"{kind}.json").write_text(json.dumps(content))
    assert is_dump(folder)
    return folder


def test_a_dump_of_mindspore_that_msprobe_has_written(tmp_path):
    """Cells, functions, parameters and gradients of MindSpore's dumps are named like the recorder's, with lines."""
    dump = given(tmp_path, "msprobe_mindspore_dump.json")
    assert read_recording(dump, "A").framework == "mindspore"
    found = records(dump)
    parts = [f"{name}.{part}" for name in ("up", "down") for part in ("weight", "bias")]
    assert sorted(key[1] for key in found if key[0] == "weight") == sorted(parts)
    assert [key[1] for key in found if key[0] == "output"] == ["up", "down"]
    assert {*parts, "output 0 of down", "output 0 of Mint.tanh", "input 0 of Mint.mean"} <= {
        key[1] for key in found if key[0] == "gradient"
    }
    output = found["output", "down", 0, 0]
    assert (output.module, output.value.shape, output.value.dtype, output.site) == (
        "down",
        (4, 5),
        "float32",
        "t.py:14",
    )
    assert output.value.norm == pytest.approx(1.12502)


def test_a_dump_that_msprobe_has_written(tmp_path):
    """Modules, functions, parameters and gradients of a dump of version 26.2 have the names of records, and lines."""
    found = records(given(tmp_path, "msprobe_dump.json"))
    weights = [key for key in found if key[0] == "weight"]
    assert weights == [("weight", f"{name}.{part}", -1, 0) for name in ("up", "norm", "down")
                       for part in ("weight", "bias")]  # fmt: skip
    assert list(found)[: len(weights)] == weights
    assert [key[1] for key in found if key[0] == "output"] == ["up", "norm", "down"]
    assert [key[1] for key in found if key[0] == "input"] == ["Functional.linear in up"]
    names = {key[1] for key in found if key[0] == "gradient"}
    assert {
        "up.weight",
        "down.bias",
        "output 0 of down",
        "input 0 of norm",
        "input 2 of Functional.linear in up",
    } <= names
    assert "input 0 of up" not in names
    output = found["output", "down", 0, 0]
    assert (output.module, output.value.shape, output.value.dtype, output.site) == (
        "down",
        (7, 2),
        "float32",
        "t.py:13",
    )
    assert output.value.norm == pytest.approx(3.05058241)
    assert found["value", "Tensor.mean", 0, 0].value.whole.item() == pytest.approx(0.66471815)


@pytest.mark.parametrize("framework", ["pytorch", "mindspore"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_numbers_are_those_of_the_tensors(tmp_path, framework, task):
    """Norm, sum and extremes are those of the elements, and with their files all numbers are."""
    training(tmp_path, ranks=2, task=task, framework=framework)
    found = records(tmp_path, 1)
    x = np.random.default_rng(7).normal(size=(2, 7, 5)).astype(np.float32)[:, 4:]
    value = found["input", "up", 0, 0].value
    expected = fingerprint_of(x).numbers
    places = [NORM, SUM, *ENDS] if task == "statistics" else slice(None)
    assert value.numbers[places] == pytest.approx(expected[places], rel=1e-5, abs=1e-5)
    assert value.known == (None if task == "tensor" else tuple(sorted([NORM, SUM, *ENDS])))
    assert (value.whole is None) == (task == "statistics")
    assert {"weight up.weight -1", "weight up.weight 0", "gradient down.weight 1", "value input 0 of down 1"} <= {
        f"{kind} {name} {step}" for kind, name, step, _ in found
    }
    recording = read_recording(tmp_path, "A")
    name = "torch" if framework == "pytorch" else "mindspore"
    assert recording.words == f"dump of msprobe {tmp_path} of {name}, 2 ranks"
    assert (recording.steps, recording.notes()) == ({0, 1}, [])


def test_what_statistics_say_of_special_tensors(tmp_path):
    """Single elements are known in full, integers and booleans by extremes, and what is not stated is not known."""
    rng = np.random.default_rng(5)
    scalar = one(tmp_path, describe(np.float32(-2.5)))
    assert (scalar.whole.item(), scalar.norm, scalar.known) == (-2.5, 2.5, None)
    assert one(tmp_path, describe(np.zeros((0, 3), np.float32))).known is None
    assert one(tmp_path, describe(rng.integers(-3, 9, (3, 5)))).known == ENDS
    flag = describe(np.array([True, False, True]))
    assert (flag["Max"], one(tmp_path, flag).numbers[LEAST], one(tmp_path, flag).dtype) == (True, 0.0, "bool")
    high = describe(rng.normal(size=(3, 5))) | {"Mean": None, "Norm": None}
    assert one(tmp_path, high).known == ENDS
    overflow = describe(rng.normal(size=(3, 5)).astype(np.float32), dtype="float16") | {"Norm": np.inf}
    assert one(tmp_path, overflow).known == tuple(sorted([SUM, *ENDS]))
    missing = one(tmp_path, describe(rng.normal(size=9)) | {"Max": np.nan, "Norm": np.nan, "Mean": np.nan})
    assert (missing.known, missing.not_finite, missing.some_not_finite) == ((LEAST, LARGEST), None, True)
    half = one(tmp_path, describe(rng.normal(size=9).astype(np.float32), dtype="bfloat16"))
    assert half.rounding == pytest.approx(2**-8 + 3 * 2**-24)


@pytest.mark.parametrize("tensor", [{"dtype": "torch.float8_e4m3fn", "shape": [3, 5], "Max": None},
                                    {"dtype": "torch.complex64", "shape": [3], "Max": 2.0, "Min": 1.0, "Norm": 3.0},
                                    {"dtype": "torch.float32", "shape": [3], "md5": "2f13e8d4"}])  # fmt: skip
def test_values_without_statistics_are_listed(tmp_path, tensor):
    """Checksums, float8 and complex numbers have no numbers that compare, and the report says so."""
    training(tmp_path, steps=(0,))
    path = tmp_path / "step0" / "rank0" / "dump.json"
    dump = json.loads(path.read_text())
    dump["data"] |= {"Tensor.to.0.forward": {"output": [{"type": "torch.Tensor", **tensor}]}, "optimizer": {}}
    path.write_text(json.dumps(dump))
    assert read_recording(tmp_path, "A").notes() == [
        f"A: not recorded: {NO_STATISTICS}",
        "A: not recorded: entries whose names are neither modules nor functions",
    ]
    dump["data"] = {"Tensor.to.0.forward": {"output": [{"type": "torch.Tensor", **tensor}]}}
    path.write_text(json.dumps(dump))
    assert refused(tmp_path) == f"A: {tmp_path} has no record of rank 0: {NO_STATISTICS}"


def test_names_of_arguments_results_and_wrappers(tmp_path):
    """Nested arguments, several results, keywords, wrappers and further calls have names of their own."""
    rng = np.random.default_rng(2)

    def tensor(size=3):
        return describe(rng.normal(size=size).astype(np.float32))

    entry = {
        "input_args": [[tensor(), {"mask": tensor()}], None], "input_kwargs": {"scale": tensor()},
        "output": [tensor(), tensor()],
    }  # fmt: skip
    names = [
        "Module.module.module.net._orig_mod.up.Linear.forward.0",
        "Module.module.module.net._orig_mod.up.Linear.forward.1",
    ]
    data = {name: {**entry, "parameters": {"weight": tensor()}} for name in names}
    data |= {"Torch.add.0.forward": entry, "Torch.add.1.backward": {"input": None}}
    construct = {"Torch.add.0.forward": [names[0], 0], "Torch.add.1.backward": None}
    write(tmp_path / "step4" / "rank0", data, construct=construct)
    (tmp_path / "step4" / "rank0" / "stack.json").unlink()
    assert [f"{kind}: {name}" for kind, name, step, call in records(tmp_path) if (step, call) == (4, 0)] == [
        "value: parameter net.up.weight", "input: net.up", "value: input 0.1.mask of net.up",
        "value: input scale of net.up", "output: net.up[0]", "output: net.up[1]", "value: input 0.0 of net.up",
        "value: input 0.0 of Torch.add in net.up", "value: input 0.1.mask of Torch.add in net.up",
        "value: input scale of Torch.add in net.up", "value: Torch.add in net.up[0]", "value: Torch.add in net.up[1]",
    ]  # fmt: skip


def test_a_partial_dtensor_is_no_value_yet(tmp_path):
    """A DTensor that awaits a sum has a region that says so, and one of shards has none."""
    array = np.ones((3, 5), np.float32)
    mesh = {"device_mesh": [0, 1], "placements": [{"Partial": {"reduce_op": "sum"}}]}
    write(tmp_path / "step0" / "rank0", {"Module.up.Linear.forward.0": {"output": [describe(array, **mesh)]}})
    assert records(tmp_path)["output", "up", 0, 0].region.pending[0].reduction == "sum"
    write(tmp_path / "step0" / "rank0", {"Module.up.Linear.forward.0": {
        "output": [describe(array, device_mesh=[0, 1], placements=[{"Shard": {"dim": 0}}])]}})  # fmt: skip
    assert records(tmp_path)["output", "up", 0, 0].region is None


def test_folders_that_are_no_dump(tmp_path):
    """Folders without ranks, with two for one rank, or without all ranks of a step are refused by name."""
    (tmp_path / "steps").mkdir()
    assert refused(tmp_path).endswith(
        "makes a recording; a dump of msprobe has folders such as step0, and logs of DebugMode are files such "
        "as rank-0.log"
    )
    training(tmp_path, ranks=3)
    (tmp_path / "step1" / "rank1" / "dump.json").unlink()
    assert refused(tmp_path) == (
        f"A: {tmp_path / 'step1' / 'rank1'} has no dump.json; levels L0, L1 and mix of msprobe write it"
    )
    for file in (tmp_path / "step1" / "rank1").iterdir():
        file.unlink()
    (tmp_path / "step1" / "rank1").rmdir()
    assert refused(tmp_path) == (
        f"A: {tmp_path} has no dump of rank 1 in step1; all ranks must dump the same steps; copy what other hosts "
        "wrote into this folder"
    )
    (tmp_path / "step0" / "proc7").mkdir()
    assert refused(tmp_path) == (
        f"A: {tmp_path / 'step0'} has several folders for one rank: proc7, rank0, rank1, rank2; processes that joined "
        "no world have no numbers: keep the folder of one run"
    )
    (tmp_path / "step2").mkdir()
    (tmp_path / "step0" / "proc7").rmdir()
    assert refused(tmp_path) == (
        f"A: {tmp_path / 'step2'} has no folder of a rank, such as step2/rank0, so it is not a dump of msprobe"
    )


@pytest.mark.parametrize("change", [{"task": "structure"}, {"framework": "tensorflow"}, {"data": [1]}])
def test_a_dump_of_an_unknown_format_is_refused(tmp_path, change):
    """Another task, framework or form of data is refused with what was found."""
    training(tmp_path, steps=(0,))
    path = tmp_path / "step0" / "rank0" / "dump.json"
    found = json.loads(path.read_text()) | change
    path.write_text(json.dumps(found))
    assert refused(tmp_path) == (
        f"A: {path} is a dump of an unknown format: task {found['task']!r}, framework {found['framework']!r}, level "
        "'mix'; dumps of the tasks statistics and tensor of pytorch and mindspore are read"
    )


@pytest.mark.parametrize("text", ['{"task": "stat', "[1, 2]", "[" * 100000])
def test_a_damaged_file_is_refused(tmp_path, text):
    """A file that was cut, is no object, or is nested too deeply is refused by its name."""
    training(tmp_path, steps=(0,))
    path = tmp_path / "step0" / "rank0" / "dump.json"
    path.write_text(text)
    assert refused(tmp_path) == (
        f"A: {path} is damaged: it is not a JSON object; the run was killed, or the copy is incomplete"
    )
    training(tmp_path, steps=(0,))
    path.with_name("stack.json").write_text('{"0": 5}')
    assert refused(tmp_path) == f"A: {path.with_name('stack.json')} is damaged: msprobe did not write it; delete it"


@pytest.mark.parametrize("entry", [
    [1], {"output": [{"dtype": "torch.float32", "shape": ["x"]}]}, {"parameters": 5},
    {"output": [{"dtype": "torch.float32", "shape": [3], "Max": "large"}]},
    {"output": [{"dtype": "torch.float32", "shape": None}]},
])  # fmt: skip
def test_a_damaged_entry_is_refused(tmp_path, entry):
    """An entry that is not a record of tensors is refused with its name."""
    write(tmp_path / "step0" / "rank0", {"Module.up.Linear.forward.0": entry})
    assert refused(tmp_path) == (
        f"A: {tmp_path / 'step0' / 'rank0' / 'dump.json'} is damaged: its entry Module.up.Linear.forward.0 is not "
        "a record of tensors"
    )


class _Command:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("framework", ["pytorch", "mindspore"])
def test_files_of_tensors_are_read_without_executing_anything(tmp_path, capsys, framework):
    """A file that is cut short, runs something, or has no tensor is refused; a missing one leaves the statistics."""
    import torch

    training(tmp_path, steps=(0,), task="tensor", framework=framework)
    folder = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    path = next(each for each in folder.iterdir() if each.name.startswith("tanh.0.output"))
    message = f"A: {path} is not a complete file of one tensor; nothing of it was executed"
    contents = path.read_bytes()
    for damaged in (b"", contents[: len(contents) // 2], pickle.dumps(_Command())):
        path.write_bytes(damaged)
        assert refused(tmp_path) == message
    if framework == "pytorch":
        torch.save([1.0], path)
    else:
        np.save(path, np.array([_Command()]), allow_pickle=True)
    assert refused(tmp_path) == message
    assert capsys.readouterr().out == ""
    array = np.ones((2, 3), np.float16)
    np.save(path, array) if framework == "mindspore" else torch.save(torch.from_numpy(array), path)
    assert refused(tmp_path) == f"A: {path} has the shape [2, 3], and dump.json says [2, 7, 11]"
    path.unlink()
    assert read_recording(tmp_path, "A").notes() == ["A: not recorded: elements of tensors whose files are missing"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64"])
def test_elements_of_all_dtypes(tmp_path, dtype):
    """Half precision is read as float32, all else as it is; files elsewhere than in the dump are not read."""
    import torch

    tensor = torch.arange(15).reshape(3, 5).to(getattr(torch, dtype))
    given = {"type": "torch.Tensor", "dtype": f"torch.{dtype}", "shape": [3, 5], "Max": 14.0, "Min": 0.0}
    folder = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    folder.mkdir(parents=True)
    torch.save(tensor, folder / "a.pt")
    value = one(tmp_path, given | {"data_name": "a.pt"})
    assert np.array_equal(value.whole, np.arange(15).reshape(3, 5))
    assert (str(value.whole.dtype), value.dtype) == ("float32" if "16" in dtype else dtype, dtype)
    if dtype == "float16":
        np.save(folder / "a.npy", tensor.numpy())
        assert one(tmp_path, given | {"data_name": "a.npy"}).whole.dtype == np.float32
    torch.save(tensor, tmp_path / "outside.pt")
    assert one(tmp_path, given | {"data_name": "../../../outside.pt"}).whole is None


def test_another_framework_has_no_files_of_one_tensor():
    """MindSpore's dumps are arrays of NumPy: only PyTorch's harness reads a file of its own."""
    with pytest.raises(UnsupportedOnBackend) as caught:
        HarnessPlatform.saved_array(_Other(), "a.pt")
    assert str(caught.value) == "a.pt is a tensor that PyTorch saved, and mindspore cannot read it"


class _Other:
    class platform:  # noqa: N801 - an attribute of a harness
        platform_type = "mindspore"

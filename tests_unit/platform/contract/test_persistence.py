"""Checkpoint files where the conformance suite does not reach: other readers, a full disk, a crash half-way."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.errors import CheckpointError, CheckpointWriteError
from hyper_parallel.platform.contract.safetensors_file import atomically
from hyper_parallel.platform.select import platform_named

FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from hyper_parallel.errors import CheckpointWriteError
from hyper_parallel.platform.select import platform_named
platform, folder = platform_named(sys.argv[1]), Path(sys.argv[2])
small, large = ({"x": platform.from_numpy(np.ones(count))} for count in (4, 100000))
for kind in ("safetensors", platform.own_format):
    path = folder / kind
    platform.save_checkpoint(small, path, kind)
    old = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        platform.save_checkpoint(large, path, kind)
    except CheckpointWriteError as error:
        assert str(path) in str(error)
        print("refused", kind, path.read_bytes() == old)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(sorted(one.name for one in folder.iterdir()))
"""


def test_a_full_disk_leaves_the_old_file(tmp_path, platform_name):
    """On a full disk the error names the file, the old file is intact, and no partial file stays."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, platform_name, str(tmp_path)], capture_output=True, text=True, check=False
    )
    own = platform_named(platform_name).own_format
    kinds = ["safetensors", own]
    wanted = [*(f"refused {kind} True" for kind in kinds), str(sorted(kinds))]
    assert done.stdout.splitlines()[-3:] == wanted, done.stderr


def test_a_crash_half_way_leaves_the_old_file(tmp_path):
    """An interruption while the new file is written is passed on and leaves the old file intact."""
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def interrupted(part):
        part.write_bytes(b"half of the new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomically(path, interrupted)
    assert [value.name for value in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"


def test_a_path_that_cannot_be_written(tmp_path, platform_name):
    """Saving to a folder that does not exist, or that is a file, raises an error with the path."""
    platform = platform_named(platform_name)
    state = {"x": platform.from_numpy(np.ones(2))}
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "no" / "x", tmp_path / "file" / "x"):
        with pytest.raises(CheckpointWriteError, match=f"save_checkpoint: {wrong} cannot be written"):
            platform.save_checkpoint(state, wrong)


@pytest.mark.parametrize(
    "name, reason",
    [("__metadata__", "safetensors reserves this name"), ("\udc80", "it has a lone surrogate")],
)
def test_a_name_that_a_safetensors_file_cannot_hold_is_refused(tmp_path, platform_name, name, reason):
    """Other programs could not read the file; the old one stays as it was."""
    platform, path = platform_named(platform_name), tmp_path / "state"
    x = platform.from_numpy(np.ones(3, np.float32))
    platform.save_checkpoint({"x": x}, path)
    old, shown = path.read_bytes(), name if name.isascii() else repr(name)
    with pytest.raises(CheckpointError) as caught:
        platform.save_checkpoint({"x": x, name: x}, path)
    assert str(caught.value) == f"save_checkpoint: {shown} is not the name of a tensor: {reason}; rename it"
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [old]


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_files_are_read_by_the_other_framework_and_by_safetensors(tmp_path):
    """A file of one framework, bfloat16 included, is loaded bit for bit by the other and by safetensors."""
    from safetensors.torch import load_file

    values = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 7
    for source, target in (("torch", "mindspore"), ("mindspore", "torch")):
        path = tmp_path / f"{source}.safetensors"
        value, other = platform_named(source), platform_named(target)
        tensor = value.from_numpy(values)
        value.save_checkpoint({"f32": tensor, "bf16": value.tensor_type_cast(tensor, "bfloat16")}, path)
        results, library = other.load_checkpoint(path), load_file(path)
        assert str(results["bf16"].dtype).rsplit(".", maxsplit=1)[-1].lower() == "bfloat16"
        for name in ("f32", "bf16"):
            want = value.tensor_to_numpy(value.load_checkpoint(path)[name])
            np.testing.assert_array_equal(other.tensor_to_numpy(results[name]), want)
            np.testing.assert_array_equal(library[name].float().numpy(), want)
        np.testing.assert_array_equal(other.tensor_to_numpy(results["f32"]), values)


OWN = {
    "torch": "load_checkpoint: {} is not a complete file of torch.save with tensors alone; nothing of it was executed; "
    "load another copy",
    "mindspore": "load_checkpoint: {} has no checksum at its end: it is truncated, of another format, or "
    "mindspore.save_checkpoint wrote it without crc_check=True; load another copy, or save it with crc_check=True",
}
DAMAGED = (
    "load_checkpoint: {} is not a complete file of mindspore.save_checkpoint: its checksum or its content is wrong; "
    "load another copy"
)


class Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def own_file(platform, folder):
    """A file of the framework's own format without suffix, and its three tensors."""
    path = folder / "own"
    state = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(5, np.float32), "c": np.array(2.5)}
    tensors = {name: platform.from_numpy(array) for name, array in state.items()}
    platform.save_checkpoint(tensors, path, platform.own_format)
    return path, state


def refused(platform, path):
    """The message with which a file of the framework's own format is refused."""
    with pytest.raises(CheckpointError) as caught:
        platform.load_checkpoint(path, platform.own_format)
    return str(caught.value)


def test_the_frameworks_own_files_come_back(tmp_path, platform_name):
    """A pt or ckpt file is loaded under the name under which it was saved, whatever its suffix."""
    platform = platform_named(platform_name)
    path, state = own_file(platform, tmp_path)
    results = platform.load_checkpoint(path, platform.own_format)
    assert list(results) == list(state)
    for name, array in state.items():
        np.testing.assert_array_equal(platform.tensor_to_numpy(results[name]), array, strict=True)
    assert [value.name for value in tmp_path.iterdir()] == ["own"]


def test_the_frameworks_own_file_cut_anywhere_is_refused(tmp_path, platform_name):
    """A pt or ckpt file without its end, cut between two tensors too, is an error and never fewer tensors."""
    platform, cut = platform_named(platform_name), tmp_path / "cut"
    whole = own_file(platform, tmp_path)[0].read_bytes()
    step = 1 if platform_name == "mindspore" else 61  # MindSpore's file is short
    for size in [*range(0, len(whole), step), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        assert refused(platform, cut) == OWN[platform_name].format(cut), size


@pytest.mark.platforms("mindspore")
def test_a_damaged_ckpt_file_is_refused(tmp_path):
    """One changed bit of a number, or bytes that belong to no tensor, fail the checksum of a ckpt file."""
    platform, wrong = platform_named("mindspore"), tmp_path / "wrong.ckpt"
    whole = own_file(platform, tmp_path)[0].read_bytes()
    place = whole.index(np.array(5.0).tobytes())
    changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for content in (changed, b"not tensors" + whole, b"crc_num" + bytes(10)):
        wrong.write_bytes(content)
        assert refused(platform, wrong) == DAMAGED.format(wrong)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_a_foreign_file_is_refused_and_nothing_of_it_executed(tmp_path, platform_name):
    """A file that is not of the framework's format is refused by name; no pickle in it is executed."""
    platform, wrong, ran = platform_named(platform_name), tmp_path / "wrong", tmp_path / "ran"
    platform.save_checkpoint({"x": platform.from_numpy(np.ones(2))}, tmp_path / "good")
    contents = [
        b"not a file of tensors at all",
        b"PK\x03\x04 and so on",
        (tmp_path / "good").read_bytes(),
        *(pickle.dumps({"x": Touch(ran)}, protocol) for protocol in (0, 2, 4)),
    ]
    for content in contents:
        wrong.write_bytes(content)
        assert refused(platform, wrong) == OWN[platform_name].format(wrong)
    assert not ran.exists()
    pickle.loads(contents[-1])  # noqa: S301 - our own, made above
    assert ran.exists()  # so it would have acted
    for member, error in ((tmp_path / "missing", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=str(member)):
            platform.load_checkpoint(member, platform.own_format)


@pytest.mark.platforms("torch")
def test_a_file_of_torch_save_that_acts_or_holds_no_state_is_refused(tmp_path):
    """Files of torch.save with an object that acts when unpickled, or without tensors by name, are refused."""
    import torch

    platform, wrong, ran = platform_named("torch"), tmp_path / "wrong.pt", tmp_path / "ran"
    for zipped in (True, False):
        torch.save({"x": Touch(ran)}, wrong, _use_new_zipfile_serialization=zipped)
        assert refused(platform, wrong) == OWN["torch"].format(wrong)
    assert not ran.exists()
    for value, kind in ((torch.ones(2), "Tensor"), ([1, 2], "list")):
        torch.save(value, wrong)
        message = f"load_checkpoint: {wrong} holds a {kind}, not tensors by name; save a state dict"
        assert refused(platform, wrong) == message

"""Checkpoint files where the conformance suite does not reach: other readers, a full disk, a crash half-way."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hyper_parallel.errors import CheckpointWriteError
from hyper_parallel.platform.contract.safetensors_file import atomically
from hyper_parallel.platform.select import platform_named

FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from hyper_parallel.errors import CheckpointWriteError
from hyper_parallel.platform.contract import safetensors_file
path = Path(sys.argv[1])
safetensors_file.write({"x": np.ones(4)}, path)
old = path.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    safetensors_file.write({"x": np.ones(100000)}, path)
except CheckpointWriteError as error:
    assert str(path) in str(error)
    print("refused", path.read_bytes() == old, [one.name for one in path.parent.iterdir()])
"""


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """When no more can be written, the error names the file, the old one is whole, and no partial file stays."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "x.safetensors")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "refused True ['x.safetensors']", done.stderr


def test_a_crash_half_way_leaves_the_old_file(tmp_path):
    """An interruption while the new file is written (Ctrl-C, say) passes, and the old file is as it was."""
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def interrupted(part):
        part.write_bytes(b"half of the new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomically(path, interrupted)
    assert [one.name for one in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"


def test_a_path_that_cannot_be_written(tmp_path, platform_name):
    """A folder that does not exist, or that is a file, is an error that names the path."""
    platform = platform_named(platform_name)
    state = {"x": platform.from_numpy(np.ones(2))}
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "no" / "x", tmp_path / "file" / "x"):
        with pytest.raises(CheckpointWriteError, match=f"save_checkpoint: {wrong} cannot be written"):
            platform.save_checkpoint(state, wrong)


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_files_are_read_by_the_other_framework_and_by_safetensors(tmp_path):
    """What one framework saves, bfloat16 included, the other loads bit for bit, and so does the safetensors library."""
    from safetensors.torch import load_file

    values = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 7
    for source, target in (("torch", "mindspore"), ("mindspore", "torch")):
        path = tmp_path / f"{source}.safetensors"
        one, other = platform_named(source), platform_named(target)
        tensor = one.from_numpy(values)
        one.save_checkpoint({"f32": tensor, "bf16": one.tensor_type_cast(tensor, "bfloat16")}, path)
        found, library = other.load_checkpoint(path), load_file(path)
        assert str(found["bf16"].dtype).rsplit(".", maxsplit=1)[-1].lower() == "bfloat16"
        for name in ("f32", "bf16"):
            want = one.tensor_to_numpy(one.load_checkpoint(path)[name])
            np.testing.assert_array_equal(other.tensor_to_numpy(found[name]), want)
            np.testing.assert_array_equal(library[name].float().numpy(), want)
        np.testing.assert_array_equal(other.tensor_to_numpy(found["f32"]), values)

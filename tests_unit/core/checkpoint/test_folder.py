"""The index of a checkpoint, damaged or made by a stranger: the state that was saved, or one message and no change."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hyper_parallel.core.checkpoint import load, save
from hyper_parallel.core.checkpoint.folder import INDEX, _text_checksum, read_index
from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.select import get_torch_platform

pytestmark = pytest.mark.platforms("torch")

VALUES = {"rate": 0.5, 3: [None, ("x", True)]}
PLAIN = st.none() | st.booleans() | st.integers(-3, 5) | st.text(max_size=4) | st.floats(allow_subnormal=False)
ANYTHING = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
HOSTILE = st.sampled_from(["../x", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "nul\0", "line\nbreak", "\ud800", "~"])
"""File names that mean something to a file system."""


def state(fill):
    """Tensors of odd, empty and no shape, two that are one, and plain values."""
    import torch

    tied = torch.full((3, 5), fill)
    tensors = {"w": tied, "tied": tied, "empty": torch.full((0, 7), fill), "one": torch.tensor(fill)}
    return {**tensors, "values": VALUES}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint, and the text of its index."""
    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    save(state(1.5), folder)
    return folder, (folder / INDEX).read_bytes()


def loaded_from(folder):
    """What loads from a folder, with its tensors, and what the error says if it is refused; nothing then changes."""
    target, refusal = state(0.0), ""
    try:
        target |= load(target, folder)
    except CheckpointError as error:
        refusal = str(error)
    expected = 0.0 if refusal else 1.5
    assert refusal.startswith("load: ") == bool(refusal)
    np.testing.assert_array_equal(target["w"], np.full((3, 5), expected))
    assert target["one"] == expected
    return target, refusal


def is_loaded(folder, content):
    """Whether an index of ``content`` loads, with the values that were saved."""
    (folder / INDEX).write_bytes(content)
    target, refusal = loaded_from(folder)
    assert target["values"] == VALUES
    return not refusal


@given(st.data())
def test_a_flipped_bit_changes_no_value(saved, data):
    """Wherever a bit of the index flips, the state that was saved is loaded, or none."""
    folder, content = saved
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    is_loaded(folder, bytes(damaged))


@given(st.data())
def test_a_cut_index_is_refused(saved, data):
    """An index that ends early is none."""
    folder, content = saved
    assert not is_loaded(folder, content[: data.draw(st.integers(0, len(content) - 1))])


@given(st.data())
def test_a_part_that_was_replaced_is_refused(saved, data):
    """Entries of any kind in the place of ours, with and without a checksum that fits, raise no other error."""
    folder, content = saved
    index = json.loads(content)
    ours = index["metadata"]["hyper_parallel"]
    key = data.draw(st.sampled_from(sorted(ours)))
    ours[key] = data.draw(ANYTHING)
    has_sum = key != "checksum" and data.draw(st.booleans())
    if has_sum:
        del ours["checksum"]
        ours["checksum"] = _text_checksum(ours)
    (folder / INDEX).write_text(json.dumps(index))
    _, refusal = loaded_from(folder)
    # Who can write the checksum can write other values and names, and leave out pieces.
    assert refusal or (has_sum and key in {"tree", "tensors", "ties"})


@given(name=HOSTILE | st.text(max_size=6))
def test_no_name_leads_out_of_the_folder(saved, name):
    """A name of a file that is a path is refused in words, and so is a file that is not there."""
    folder, content = saved
    index = json.loads(content)
    ours = index["metadata"].pop("hyper_parallel")
    ours["file"] = name
    del ours["checksum"]
    for metadata in ({}, {"hyper_parallel": ours}):
        assert not is_loaded(folder, json.dumps({"metadata": metadata, "weight_map": {"w": name}}).encode())


def test_a_file_beside_the_folder_is_not_read(saved, tmp_path):
    """A complete file one folder up is not opened."""
    folder, content = saved
    inside = tmp_path / "inside"
    inside.mkdir()
    (data_file,) = folder.glob("data-*")
    (tmp_path / "x.safetensors").write_bytes(data_file.read_bytes())
    (inside / INDEX).write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    path = inside / INDEX
    message = f"load: {path} names the file '../x.safetensors'; only files in its own folder are read"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_index(inside)
    assert content


@pytest.mark.parametrize(
    "change, message",
    [
        ({"other": 1}, "is damaged: it has unknown entries ['other']"),
        ({"tree": {"value": 3}}, "is damaged: its checksum differs"),
        ({"ties": {"a": 3}}, "is damaged: its ties are {'a': 3}"),
        ({"tree": {"items": [["a"]]}}, "is damaged: its values are not those of a state"),
        ({"tree": {"other": 3}}, "is damaged: its values are not those of a state"),
        ({"tree": {"list": [3]}}, "is damaged: its values are not those of a state"),
        ({"tensors": {"w": ["F32", [-1], []]}}, "is damaged: w is F32[-1]"),
        (
            {"tensors": {"w": ["F32", [3], [[[[0, 4]], 0]]]}},
            "is damaged: the piece [[0, 4]] of w is not within its shape [3]",
        ),
    ],
)
def test_what_is_wrong_is_said(saved, change, message):
    """The message has the path of the index and what is wrong in it."""
    folder, content = saved
    index = json.loads(content)
    ours = index["metadata"]["hyper_parallel"]
    ours.update(change)
    if "checksum differs" not in message:
        del ours["checksum"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(f"load: {folder / INDEX} {message}")):
        read_index(folder)


def test_the_data_of_save_needs_its_index(saved):
    """An index that names a data file of ours without its checksums is not taken for one of another program."""
    folder, content = saved
    weight_map = json.loads(content)["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    message = "is damaged: it names a data file of save, but does not list its tensors"
    with pytest.raises(CheckpointError, match=message):
        read_index(folder)


def test_a_tensor_in_two_files_is_refused(saved, tmp_path):
    """Which of two tensors of one name is meant would be a guess."""
    (data_file,) = saved[0].glob("data-*")
    for name in ("a", "b"):
        Path(tmp_path / name).write_bytes(data_file.read_bytes())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a", "one": "b"}}))
    message = f"load: empty, one, w is in several of the files that {tmp_path / INDEX} names"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_index(tmp_path)


def test_an_index_without_a_checksum_loads(saved):
    """Checkpoints that were written before the index had a checksum load."""
    folder, content = saved
    index = json.loads(content)
    del index["metadata"]["hyper_parallel"]["checksum"]
    assert is_loaded(folder, json.dumps(index).encode())


@pytest.mark.parametrize("place", [INDEX, "data", "model.safetensors", "shard.safetensors"])
def test_a_fifo_is_refused(saved, tmp_path, place):
    """Of all files that are read: it may have no writer, and would be waited for."""
    folder, content = saved
    name = next(folder.glob("data-*")).name if place == "data" else place
    if place == "shard.safetensors":
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    elif place == "data":
        (tmp_path / INDEX).write_bytes(content)
    os.mkfifo(tmp_path / name)
    problem = "is missing or truncated; its index expects" if place == "data" else "is not a regular file"
    assert loaded_from(tmp_path)[1].startswith(f"load: {tmp_path / name} {problem}")
    with pytest.raises(CheckpointError) as caught:
        get_torch_platform().load_checkpoint(tmp_path / name)
    assert str(caught.value) == (
        f"load_checkpoint: {tmp_path / name} is not a regular file; load a copy of the checkpoint on a file system"
    )

"""Names that mean something to a file system, to JSON or to the format are names like others, or refused in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st

from hyper_parallel.core.checkpoint import load, save
from hyper_parallel.core.checkpoint.folder import INDEX
from hyper_parallel.errors import CheckpointError

pytestmark = pytest.mark.platforms("torch")

HOSTILE = (
    "../x", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "nul\0", "line\nbreak", "\ud800", "\u202e", "~", "CON",
    "__metadata__", "metadata", "weight_map", "tensor", "items", "value", "state", "w", "W", "é", "e\u0301", "n" * 3000,
    "a.b", "a", ".a", "0", "*", "a.*",
)  # fmt: skip
KEYS = st.sampled_from(HOSTILE) | st.text(max_size=3) | st.integers(-1, 2)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(HOSTILE)
STATES = st.recursive(
    VALUES | st.builds(lambda size: ("tensor", size), st.integers(0, 2)) | st.builds(lambda of: ("owner", of), VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


class Owner:
    """An object with a state, as a scheduler is."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        """The value."""
        return {"value": self.value}

    def load_state_dict(self, state):
        """Take the value."""
        self.value = state["value"]


def made(state, blank):
    """A state with tensors and owners; a blank one has other values."""
    import torch

    if isinstance(state, dict):
        return {key: made(inner, blank) for key, inner in state.items()}
    if isinstance(state, list):
        return [made(inner, blank) for inner in state]
    if not isinstance(state, tuple):
        return None if blank else state
    kind, content = state
    if kind == "owner":
        return Owner(None if blank else content)
    return torch.full((content,), 0.0 if blank else 1.5)


def plain(state):
    """The state with lists in the place of tensors, and dictionaries in the place of owners."""
    import torch

    if isinstance(state, Owner):
        return state.state_dict()
    if isinstance(state, dict):
        return {key: plain(inner) for key, inner in state.items()}
    if isinstance(state, list):
        return [plain(inner) for inner in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def owners(state):
    """The values of the owners of a state, in order."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list):
        return [value for inner in state for value in owners(inner)]
    return [state.value] if isinstance(state, Owner) else []


def refused(state, folder, names=None):
    """Save a state; what the error says if it is refused."""
    try:
        save(state, folder, names=names)
    except CheckpointError as error:
        return str(error)
    return ""


@given(recipe=st.dictionaries(KEYS, STATES, max_size=4))
def test_a_state_of_any_names_comes_back_or_is_refused(recipe):
    """Nothing is written outside of the folder; what is saved loads whole, and other programs can read the file."""
    from safetensors.numpy import load_file

    with TemporaryDirectory() as parent:
        folder = Path(parent) / "saved"
        state = made(recipe, blank=False)
        if refusal := refused(state, folder):
            assert refusal.startswith("save: ")
            assert list(Path(parent).iterdir()) == []
            return
        assert [path.name for path in Path(parent).iterdir()] == ["saved"]
        index = json.loads((folder / INDEX).read_text())
        files = {index["metadata"]["hyper_parallel"]["file"], INDEX}
        assert {path.name for path in folder.iterdir()} == files
        (data,) = files - {INDEX}
        assert set(load_file(folder / data)) == set(index["weight_map"])
        target = made(recipe, blank=True)
        assert plain(state) == plain(load(target, folder))
        assert owners(state) == owners(target)


@given(names=st.dictionaries(st.sampled_from(HOSTILE), st.sampled_from(HOSTILE), max_size=3))
def test_names_in_the_folder_may_be_hostile_too(names):
    """A map of names gives tensors, and not files, their names; what it saves it loads."""
    import torch

    with TemporaryDirectory() as parent:
        folder = Path(parent) / "saved"
        state = {key: torch.tensor([float(number)]) for number, key in enumerate(["w", "a", "../x", "e"])}
        if refusal := refused(state, folder, names):
            assert refusal.startswith("save: ")
            assert list(Path(parent).iterdir()) == []
            return
        assert [path.name for path in Path(parent).iterdir()] == ["saved"]
        target = {key: torch.tensor([9.0]) for key in state}
        assert plain(load(target, folder, names=names)) == plain(state)


@pytest.mark.parametrize(
    "name, message",
    [
        ("__metadata__", "__metadata__ is not the name of a tensor: safetensors reserves this name; rename it"),
        ("\udc80", "'\\udc80' is not the name of a tensor: it has a lone surrogate; rename it"),
    ],
)
def test_a_name_that_no_file_can_hold_is_refused(tmp_path, name, message):
    """It is refused before anything is written, as a name of the state and of the folder, and of a tied tensor."""
    import torch

    x = torch.ones(2)
    for state, names in (({name: x}, None), ({"w": x}, {"w": name}), ({"w": x, name: x}, None)):
        with pytest.raises(CheckpointError, match=f"^save: {re.escape(message)}$"):
            save(state, tmp_path / "saved", names=names)
    assert list(tmp_path.iterdir()) == []


def test_objects_are_found_by_their_keys(tmp_path):
    """A key that is empty, or has dots, leads to its own object, also where another path reads the same."""
    state = {"a": {"b": Owner(1), "": Owner(2)}, "a.b": Owner(3), "": Owner(4), "c": [0, Owner(5)]}
    save(state, tmp_path)
    target = {"": Owner(0), "c": [0, Owner(0)], "a.b": Owner(0), "a": {"": Owner(0), "b": Owner(0)}}
    load(target, tmp_path)
    assert owners(target) == [4, 5, 3, 2, 1]


def test_an_object_is_found_by_its_name(tmp_path):
    """Where no keys lead to an object, its name does, as that of a tensor does; nothing has the name of the whole."""
    save({"a": {"b": [Owner(1)]}}, tmp_path)
    target = {"a.b.0": Owner(0)}
    load(target, tmp_path)
    assert owners(target) == [1]
    for key, name in (("a.b.0.c", "a.b.0.c"), ("", ""), ("x", "x")):
        message = f"does not match the state: the checkpoint has no value at {name} (on ranks [0])"
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load({key: Owner(0)}, tmp_path)

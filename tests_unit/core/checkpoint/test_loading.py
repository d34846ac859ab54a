"""What one framework saves, either loads, on another mesh."""

from __future__ import annotations

import shutil
from weakref import ref

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.checkpoint import load, loading, save
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify import simulate


def state_of(platform, array, numbers, shape):
    """A DTensor over a mesh of ``shape``, a plain tensor, and values."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    placements = [Shard(0), Shard(1)] if shape[1] == 1 else [Shard(1), Shard(1)]
    return {
        "w": distribute_tensor(platform.from_numpy(array), mesh, placements),
        "n": platform.from_numpy(numbers),
        "values": {"rate": 0.5, 3: [None, ("x", True)]},
    }


def round_trip(first, second, folder):
    """Save over 3 ranks in one framework, and load over 4 in the other."""
    array = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    numbers = np.arange(3)

    def saving():
        save(state_of(platform_named(first), array, numbers, (3, 1)), folder)

    def loading():
        platform = platform_named(second)
        state = state_of(platform, array * 0, numbers * 0, (2, 2))
        loaded = load(state, folder)
        assert loaded["values"] == {"rate": 0.5, 3: [None, ("x", True)]}
        np.testing.assert_array_equal(platform.tensor_to_numpy(state["w"].full_tensor()), array)
        np.testing.assert_array_equal(platform.tensor_to_numpy(state["n"]), numbers)

    simulate(saving, 3, platform=first)
    simulate(loading, 4, platform=second)


def test_a_framework_loads_what_it_saved(platform_name, tmp_path):
    """Tensors and values of every kind come back, on another mesh."""
    round_trip(platform_name, platform_name, tmp_path)


@pytest.mark.platforms("torch", "mindspore", together=True)
@pytest.mark.parametrize("frameworks", [("torch", "mindspore"), ("mindspore", "torch")])
def test_the_other_framework_loads_it(frameworks, tmp_path):
    """The folder does not depend on the framework."""
    round_trip(*frameworks, tmp_path)


@pytest.mark.platforms("torch")
def test_ranks_outside_of_a_mesh_write_and_read_nothing(tmp_path):
    """Tensors on meshes of different ranks, such as those of pipeline stages, are saved and loaded by these."""
    arrays = {"first": np.arange(5.0), "second": np.arange(7.0) + 5, "scale": np.array(3.0)}

    def state_over(factor, **ranks):
        state = {}
        for name, array in arrays.items():
            mesh = init_device_mesh("cpu", (len(ranks[name]),), rank_list=ranks[name])
            values = platform_named("torch").from_numpy(factor * array)
            state[name] = distribute_tensor(values, mesh, [Shard(0) if array.ndim else Replicate()])
        return state

    def saving():
        save(state_over(1, first=[0], second=[2, 1], scale=[1, 2]), tmp_path)

    def loading():
        state = state_over(0, first=[1, 0], second=[1], scale=[1])
        load(state, tmp_path)
        inside = {name: x for name, x in state.items() if x.device_mesh.get_coordinate() is not None}
        return {name: x.full_tensor().numpy() for name, x in inside.items()}

    simulate(saving, 3, platform="torch")
    first, second = simulate(loading, 2, platform="torch")
    assert (first.keys(), second.keys()) == ({"first"}, arrays.keys())
    for name, array in [*first.items(), *second.items()]:
        np.testing.assert_array_equal(array, arrays[name])


def test_memory_holds_one_shard_besides_the_state(platform_name, tmp_path, monkeypatch):
    """What was read of one tensor is freed before the next is read; values of every tensor come from the folder."""
    platform, plain = platform_named(platform_name), loading._shard
    arrays = {f"w{index}": np.full((3, 5 + index), index, np.float32) for index in range(4)}
    read, bytes_alive = [], []

    def counting(*args):
        bytes_alive.append(sum(array().nbytes for array in read if array() is not None))
        array = plain(*args)
        read.append(ref(array))
        return array

    monkeypatch.setattr(loading, "_shard", counting)
    save({name: platform.from_numpy(array) for name, array in arrays.items()}, tmp_path)
    state = {name: platform.from_numpy(array * 0) for name, array in arrays.items()}
    load(state, tmp_path)
    assert bytes_alive == [0, 0, 0, 0]
    for name, array in arrays.items():
        np.testing.assert_array_equal(platform.tensor_to_numpy(state[name]), array)


def test_what_was_checked_can_be_read_though_the_file_is_deleted(platform_name, tmp_path, monkeypatch):
    """A folder that is deleted between the check and the reading leaves no state that is half filled."""
    platform, plain = platform_named(platform_name), loading._shard
    array = np.arange(6, dtype=np.float32)
    save({"a": platform.from_numpy(array), "b": platform.from_numpy(array + 1)}, tmp_path)

    def deleting(*args):
        shutil.rmtree(tmp_path, ignore_errors=True)
        return plain(*args)

    monkeypatch.setattr(loading, "_shard", deleting)
    state = {"a": platform.from_numpy(array * 0), "b": platform.from_numpy(array * 0)}
    load(state, tmp_path)
    np.testing.assert_array_equal(platform.tensor_to_numpy(state["a"]), array)
    np.testing.assert_array_equal(platform.tensor_to_numpy(state["b"]), array + 1)

"""What one framework saves, either loads, on another mesh."""

from __future__ import annotations

import json
import shutil
from weakref import ref

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard, distribute_tensor, fully_shard, init_device_mesh
from hyper_parallel.core.checkpoint import Blocks, load, loading, save
from hyper_parallel.core.checkpoint.folder import INDEX
from hyper_parallel.errors import CheckpointError
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


def make_model(*, tied):
    """An embedding and a head of 7 words."""
    from torch import nn

    class Words(nn.ModuleDict):
        def forward(self, words):
            return self["head"](self["embed"](words))

    model = Words({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    if tied:
        model["head"].weight = model["embed"].weight
    return model


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tied_weights_are_stored_once_and_stay_tied(tmp_path, ranks):
    """Before and after sharding, and under another order of the two names."""
    import torch
    from safetensors.torch import load_file

    reference = make_model(tied=True)

    def rank():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        model = make_model(tied=True)
        model.load_state_dict(reference.state_dict())
        fully_shard(model, mesh=mesh)
        save(model, tmp_path)
        for state in (make_model(tied=True), fully_shard(make_model(tied=True), mesh=mesh)):
            loaded = load(state, tmp_path)
            assert loaded["head.weight"] is loaded["embed.weight"]
            assert state["head"].weight is state["embed"].weight
            weight = state["head"].weight
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
            assert torch.equal(whole, reference["embed"].weight.detach())
        other = torch.nn.ModuleDict(dict(reversed(make_model(tied=True).items())))
        load(other, tmp_path)
        assert torch.equal(other["head"].weight, reference["embed"].weight)

    simulate(rank, ranks, platform="torch")
    (file,) = tmp_path.glob("data-*")
    assert list(load_file(file)) == ["embed.weight"]
    assert list(json.loads((tmp_path / INDEX).read_text())["weight_map"]) == ["embed.weight"]


@pytest.mark.platforms("torch")
def test_other_ties_are_refused(tmp_path):
    """Tied on one side only, or a name that only one side has."""
    import torch

    def rank():
        save(make_model(tied=True), tmp_path / "tied")
        save(make_model(tied=False), tmp_path / "apart")
        tied, apart = make_model(tied=True), make_model(tied=False)
        before = [parameter.detach().clone() for parameter in (*tied.parameters(), *apart.parameters())]
        for model, folder, text in (
            (tied, "apart", "state: embed.weight, head.weight are tied in the state, but not in the checkpoint"),
            (apart, "tied", "state: embed.weight, head.weight are tied in the checkpoint, but not in the state"),
            (torch.nn.ModuleDict({"embed": apart["embed"]}), "tied", "state: head.weight is only in the checkpoint"),
            (
                torch.nn.ModuleDict({"tail": apart["embed"]}),
                "tied",
                "tail.weight is not in the checkpoint; embed.weight is",
            ),
        ):
            with pytest.raises(CheckpointError, match=text):
                load(model, tmp_path / folder)
        after = (*tied.parameters(), *apart.parameters())
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

    simulate(rank, 2, platform="torch")


@pytest.mark.platforms("torch")
def test_the_state_dict_of_a_new_optimizer_cannot_be_filled(tmp_path):
    """The message says what to give instead; the optimizer itself loads, and other differences stay in the message."""
    import torch

    def rank():
        model = make_model(tied=False)
        optimizer = torch.optim.Adam(model.parameters())
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        save({"optimizer": optimizer, "x": torch.ones(2)}, tmp_path)
        fresh = torch.optim.Adam(model.parameters())
        with pytest.raises(CheckpointError) as caught:
            load({"optimizer": fresh.state_dict(), "x": torch.ones(3)}, tmp_path)
        load({"optimizer": fresh, "x": torch.ones(2)}, tmp_path)
        assert fresh.state_dict()["state"][0]["exp_avg"].abs().sum() > 0
        return str(caught.value).partition("state: ")[2]

    message = (
        "x is F32[3], saved as F32[2]; optimizer is the state dict of an optimizer that has not stepped; give the "
        "optimizer itself (on ranks [0, 1])"
    )
    assert simulate(rank, 2, platform="torch") == [message] * 2


@pytest.mark.platforms("torch")
def test_names_apply_to_ties(tmp_path):
    """A renamed alias is an alias; one that would be the same name, or blocks, is left out."""
    import torch

    def rank():
        model = make_model(tied=True)
        save({"model": model}, tmp_path / "x", names={"model.embed": "wte", "model": "lm"})
        state = torch.nn.ModuleDict({"lm": torch.nn.ModuleDict({"head": model["head"]}), "wte": model["embed"]})
        load(state, tmp_path / "x")
        save(model, tmp_path / "y", names={"embed": "shared", "head": "shared"})
        load({"shared.weight": torch.zeros(7, 3)}, tmp_path / "y")
        save(model, tmp_path / "z", names={"embed.weight": "e", "head.weight": Blocks(("a", "b"), (3, 4))})
        weight = torch.zeros(7, 3)
        load({"e": weight}, tmp_path / "z")
        assert torch.equal(weight, model["embed"].weight)

    simulate(rank, 2, platform="torch")


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("stored", ["embed.weight", "head.weight"])
def test_files_of_other_programs_load(tmp_path, files, stored):
    """A single safetensors file, or several with an index; of tied weights it has one under either name."""
    import torch
    from safetensors.torch import save_file

    reference = torch.arange(21.0).view(7, 3)
    if files == "one":
        save_file({stored: reference, "x": torch.ones(3).bfloat16()}, tmp_path / "model.safetensors")
    else:
        save_file({stored: reference}, tmp_path / "model-1.safetensors")
        save_file({"x": torch.ones(3).bfloat16()}, tmp_path / "model-2.safetensors")
        weight_map = {stored: "model-1.safetensors", "x": "model-2.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    def rank():
        model = make_model(tied=True)
        model.register_buffer("x", torch.zeros(3).bfloat16())
        fully_shard(model, mesh=init_device_mesh("cpu", (3,), mesh_dim_names=("dp",)))
        state = load({"model": model, "step": 4}, tmp_path, names={"model": ""})
        assert state["step"] == 4
        assert torch.equal(model["head"].weight.full_tensor(), reference)
        assert torch.equal(state["model"]["x"], torch.ones(3).bfloat16())

    simulate(rank, 3, platform="torch")


@pytest.mark.platforms("torch")
def test_damaged_files_of_other_programs_are_refused(tmp_path):
    """A file that is cut or missing, and dtypes that are not supported."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"

    def refused(text):
        def rank():
            with pytest.raises(CheckpointError, match=text):
                load({"w": torch.zeros(3)}, tmp_path)

        simulate(rank, 2, platform="torch")

    save_file({"w": torch.ones(3).to(torch.float8_e4m3fn)}, path)
    refused(r"model\.safetensors has dtypes that are not supported: w \(F8_E4M3\)")
    save_file({"w": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    refused(r"model\.safetensors is missing or not a complete safetensors file: ")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "other.safetensors"}}))
    refused(r"other\.safetensors is missing or not a complete safetensors file: ")

"""Tied parameters are stored once and stay tied, and a checkpoint with other ties is refused."""

from __future__ import annotations

import json

import pytest

from hyper_parallel import fully_shard, init_device_mesh
from hyper_parallel.core.checkpoint import Blocks, load, save
from hyper_parallel.core.checkpoint.folder import INDEX
from hyper_parallel.errors import CheckpointError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def make_model(*, tied):
    """An embedding and a head of 7 words."""
    from torch import nn

    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    if tied:
        model["head"].weight = model["embed"].weight
    return model


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


def test_other_ties_are_refused(tmp_path):
    """Tied on one side only, or a name that only one side has."""
    import torch

    def rank():
        save(make_model(tied=True), tmp_path / "tied")
        save(make_model(tied=False), tmp_path / "apart")
        tied, apart = make_model(tied=True), make_model(tied=False)
        before = [parameter.detach().clone() for parameter in (*tied.parameters(), *apart.parameters())]
        for model, folder, text in (
            (tied, "apart", "state: embed.weight, head.weight are tied in the state, and not in the checkpoint"),
            (apart, "tied", "state: embed.weight, head.weight are tied in the checkpoint, and not in the state"),
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
    refused(r"model\.safetensors is missing or no whole safetensors file: ")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "other.safetensors"}}))
    refused(r"other\.safetensors is missing or no whole safetensors file: ")

"""Checkpoints: saved by all ranks at once, loaded on any other mesh, never half written, never half loaded."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.checkpoint import async_save, load, save
from hyper_parallel.core.checkpoint.folder import INDEX, DataFile
from hyper_parallel.errors import CheckpointError, CheckpointWriteError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def make_model(seed):
    """Layers of odd sizes, with a bfloat16 buffer."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.head = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3)
            self.register_buffer("table", torch.randn(3).bfloat16())

        def forward(self, x):
            return self.head(self.down(torch.tanh(self.up(x))))

    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Model()
    torch.random.set_rng_state(state)
    return model


def sharded(model, shape):
    """The model over a mesh (dp, tp); for None as it is."""
    if shape is None:
        return model
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=grid["dp"])


def trained(model):
    """Optimizer and scheduler after two steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        train(model, optimizer)
        scheduler.step()
    return optimizer, scheduler


def train(model, optimizer):
    """One step on a batch that is the same on every rank."""
    import torch

    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 10).view(2, 5)).square().mean().backward()
    optimizer.step()


def whole(value):
    """The global tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


class Counter:
    """An object with a state."""

    count = 0

    def state_dict(self):
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state):
        """Take the count."""
        self.count = state["count"]


def ranks_of(shape):
    """Number of ranks of a mesh shape."""
    return 1 if shape is None else int(np.prod(shape))


@pytest.mark.parametrize("first", [None, (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("second", [None, (1, 3), (2, 3), (4, 1)])
def test_training_goes_on_on_another_mesh(first, second, tmp_path):
    """Model, optimizer, scheduler and step are those that were saved, and the next step has the same weights."""
    import torch

    def saving():
        model = sharded(make_model(1), first)
        optimizer, scheduler = trained(model)
        save({"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 2}, tmp_path)

    simulate(saving, ranks_of(first), platform="torch")
    dense = make_model(1)
    dense_optimizer, dense_scheduler = trained(dense)
    expected = [parameter.detach().clone() for parameter in dense.parameters()]
    train(dense, dense_optimizer)

    def loading():
        model = sharded(make_model(2), second)
        optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        state = load({"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}, tmp_path)
        assert state["step"] == 2
        assert scheduler.state_dict() == dense_scheduler.state_dict()
        assert optimizer.param_groups[0]["lr"] == dense_optimizer.param_groups[0]["lr"]
        assert torch.equal(whole(model.table), dense.table)
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(whole(mine), theirs)
        train(model, optimizer)
        for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), theirs.detach(), rtol=1e-5, atol=1e-6)

    simulate(loading, ranks_of(second), platform="torch")


def test_other_programs_read_whole_tensors(tmp_path):
    """The data is a safetensors file of global names and shapes, which the index names; an older one is removed."""
    from safetensors.torch import load_file

    model = make_model(1)

    def saving():
        for _ in range(2):
            save(sharded(copy.deepcopy(model), (2, 2)), tmp_path)

    simulate(saving, 4, platform="torch")
    index = json.loads((tmp_path / INDEX).read_text())
    (name,) = set(index["weight_map"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([INDEX, name])
    tensors = load_file(tmp_path / name)
    state = model.state_dict()
    assert set(tensors) == set(index["weight_map"]) == set(state)
    assert all(tensors[key].equal(state[key]) and tensors[key].dtype is state[key].dtype for key in state)


def test_what_does_not_fit_is_refused_as_a_whole(tmp_path):
    """All differences are in one message on every rank, and nothing is changed."""
    import torch

    folder = tmp_path / "new"

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        saved = {"a": distribute_tensor(torch.ones(3), mesh, [Shard(0)]), "b": torch.ones(2), "c": torch.ones(2)}
        save(saved, folder)
        mine = {"a": torch.zeros(3), "b": torch.zeros(4), "d": torch.zeros(1)}
        with pytest.raises(CheckpointError) as info:
            load(mine, folder)
        assert str(info.value) == (
            f"load: the checkpoint in {folder} does not match the state: d is not in the checkpoint; c is only in the "
            "checkpoint; b is F32[4], saved as F32[2] (on ranks [0, 1])"
        )
        assert not mine["a"].any()
        fitting = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(2)}
        for extra in ({"s": Counter()}, {"a.s": Counter()}):
            with pytest.raises(CheckpointError, match=r"the checkpoint has no value at (a\.)?s \(on ranks \[0, 1\]\)$"):
                load({**fitting, **extra}, folder)
        assert not fitting["a"].any()
        with pytest.raises(CheckpointError, match=r"^save: the tensors of ranks \[1\] differ from those of rank 0 in"):
            save({"x": torch.ones(2 + mesh.rank)}, folder)
        for value, text in (
            (object(), "^save: a is a object; a state is made of"),
            ({(1,): 2}, r"^save: a has the key \(1,\); keys are strings or integers"),
            (torch.ones(2, dtype=torch.complex128), "^save: a is complex128, which safetensors does not support"),
            (distribute_tensor(torch.ones(2), mesh, [Partial()]), r"reduce it first, with reduce_partial\(\)$"),
        ):
            with pytest.raises(CheckpointError, match=text):
                save({"a": value}, folder)
        with pytest.raises(CheckpointError, match=r"^save: two tensors of the state are named a\.b; rename one"):
            save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, folder)
        assert load({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(2)}, folder)["a"].sum() == 3

    simulate(rank, 2, platform="torch")


@pytest.mark.fault
def test_damage_is_found_before_anything_is_loaded(tmp_path):
    """A changed byte, a cut or missing file, another header, a foreign index and a newer version are errors."""
    import torch

    counter = Counter()
    counter.count = 5
    simulate(lambda: save({"x": torch.arange(9.0), "n": (1, [None, counter])}, tmp_path), 2, platform="torch")
    (path,) = tmp_path.glob("data-*")
    content, index = path.read_bytes(), (tmp_path / INDEX).read_text()

    def refused(text):
        def rank():
            x = torch.zeros(9)
            with pytest.raises(CheckpointError, match=text):
                load({"x": x, "n": (0, [0])}, tmp_path)
            assert not x.any()

        simulate(rank, 2, platform="torch")

    path.write_bytes(content[:-1] + b"\x01")
    refused(r"^load: x in .* is damaged: its checksum at \[\[0, 9\]\] differs \(on ranks \[0\]\)$")
    path.write_bytes(content[:-1])
    refused("is missing or truncated; its index expects")
    path.write_bytes(content[:20] + b"?" + content[21:])
    refused("is not the file that its index describes")
    path.unlink()
    refused("is missing or truncated")
    (tmp_path / INDEX).write_text(index.replace('"version": 1', '"version": 2'))
    refused("has version 2; this release reads version 1")
    (tmp_path / INDEX).write_text("{}")
    refused("is not the index of a checkpoint")
    (tmp_path / INDEX).unlink()
    refused("No such file")
    path.write_bytes(content)
    (tmp_path / INDEX).write_text(index)
    counter.count = 0
    load({"x": torch.zeros(9), "n": (0, [0, counter])}, tmp_path)
    assert counter.count == 5


@pytest.mark.fault
def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """If one rank cannot write, all raise, and the earlier checkpoint is whole."""
    import torch

    write = DataFile.write

    def failing(self, parts):
        if any(name == "y" for name, _, _ in parts):
            raise OSError("disk full")
        return write(self, parts)

    monkeypatch.setattr(DataFile, "write", failing)

    def rank():
        save({"x": torch.ones(3)}, tmp_path)
        with pytest.raises(CheckpointWriteError, match=r"^disk full \(on ranks \[0\]\)$"):
            save({"y": torch.ones(5)}, tmp_path)
        assert load({"x": torch.zeros(3)}, tmp_path)["x"].sum() == 3

    simulate(rank, 2, platform="torch")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, ranks):
    """An asynchronous save has the values of its call; until all have waited, the earlier checkpoint is there."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        value, plain = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]), torch.ones(2)
        save({"x": value, "y": plain, "step": 1}, tmp_path)
        value.add_(1)
        pending = async_save({"x": value, "y": plain, "step": 2}, tmp_path)
        value.add_(1)
        plain.zero_()
        read = {"x": distribute_tensor(torch.zeros(7), mesh, [Shard(0)]), "y": torch.zeros(2), "step": 0}
        assert load(read, tmp_path)["step"] == 1
        pending.wait()
        pending.wait()
        assert pending.done()
        assert load(read, tmp_path)["step"] == 2
        assert torch.equal(read["x"].full_tensor(), torch.arange(1.0, 8))
        assert torch.equal(read["y"], torch.ones(2))

    simulate(rank, ranks, platform="torch")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.fault
def test_an_asynchronous_save_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    """A full disk is an error of ``wait`` on all ranks, and so is a save that another one has overtaken."""
    import torch

    write = DataFile.write

    def failing(self, parts):
        if any(name == "z" for name, _, _ in parts):
            raise OSError("disk full")
        return write(self, parts)

    monkeypatch.setattr(DataFile, "write", failing)

    def rank():
        overtaken = async_save({"x": torch.zeros(3)}, tmp_path)
        failing_save = async_save({"z": torch.ones(5)}, tmp_path)
        save({"x": torch.ones(3)}, tmp_path)
        with pytest.raises(CheckpointWriteError, match=r"^disk full \(on ranks \[0\]\)$"):
            failing_save.wait()
        with pytest.raises(CheckpointWriteError) as info:
            overtaken.wait()
        assert str(info.value).endswith(
            ".safetensors was removed: another save in this folder finished after this one began; wait for each save "
            "before the next begins (on ranks [0])"
        )
        assert load({"x": torch.zeros(3)}, tmp_path)["x"].sum() == 3

    simulate(rank, 2, platform="torch")
    assert len(list(tmp_path.iterdir())) == 2

"""``torch.distributed.checkpoint.state_dict`` over modules of this library, as over those of PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from hyper_parallel import ColwiseParallel, DTensor, NoParallel, RowwiseParallel, fully_shard, parallelize_module
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


class Model(nn.Module):
    """Layers of sizes that few numbers of ranks divide, a vector of one element, a number and a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x):
        """``x_B5 -> y_B3``."""
        return self.down(torch.tanh(self.up(x))) * self.scale + self.shift


def parallel(kind, ranks, seed=0, *, meta=False):
    """A model with the layouts of ``kind``, and its optimizer."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = Model()
    shape = {"both": (ranks // 2, 2), "tp": (1, ranks), "dp": (ranks, 1)}[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if kind != "dp":
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind != "tp":
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def trained(model, optimizer):
    """Two steps of ``model``."""
    for step in range(2):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model, optimizer):
    """Whole values of parameters, buffers and optimizer states, and learning rates."""
    state = optimizer.state_dict()
    found = [*model.state_dict().values(), *(value for one in state["state"].values() for value in one.values())]
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in found]
    return whole, [type(value) for value in found], [group["lr"] for group in state["param_groups"]]


def assert_same(one, other):
    """Assert that two models and optimizers have equal values, of the same types."""
    (mine, kinds, rates), (theirs, other_kinds, other_rates) = values(*one), values(*other)
    assert kinds == other_kinds
    assert DTensor in {base for kind in kinds for base in kind.__mro__}
    assert rates == other_rates
    assert all(map(torch.equal, mine, theirs))


LAYOUTS = [("dp", 2), ("dp", 3), ("tp", 3), ("both", 4)]


@pytest.mark.parametrize("kind, ranks", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}],
    ids=lambda options: "-".join(options) or "sharded",
)
def test_states_come_back(kind, ranks, options):
    """What is read from one model and optimizer, and set in others, gives these all values and layouts."""

    def main():
        first = parallel(kind, ranks)
        trained(*first)
        state, optimizer_state = get_state_dict(*first, options=StateDictOptions(**options))
        if "full_state_dict" in options:
            flat = [*state.values(), *(one for each in optimizer_state["state"].values() for one in each.values())]
            assert not any(isinstance(value, DTensor) for value in flat)
            assert state["up.weight"].shape == (7, 5)
        second = parallel(kind, ranks, seed=3)
        chosen = {name: value for name, value in options.items() if name != "cpu_offload"}
        set_state_dict(
            *second,
            model_state_dict=copy.deepcopy(state),
            optim_state_dict=copy.deepcopy(optimizer_state),  # an optimizer takes over what it is given
            options=StateDictOptions(**chosen),
        )
        assert_same(first, second)
        trained(*first)
        trained(*second)
        assert_same(first, second)

    simulate(main, ranks)


@pytest.mark.parametrize("kind, ranks", LAYOUTS)
def test_rank_0_may_have_all_values(kind, ranks):
    """With cpu_offload rank 0 alone has whole values; broadcast_from_rank0 gives them to models of other ranks."""

    def main():
        first = parallel(kind, ranks)
        trained(*first)
        gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(first[0], options=gathered)
        optimizer_state = get_optimizer_state_dict(*first, options=gathered)
        rank = torch.distributed.get_rank()
        assert bool(state) == bool(optimizer_state) == (rank == 0)
        second = parallel(kind, ranks, seed=3)
        sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(second[0], state, options=sent)
        set_optimizer_state_dict(*second, optimizer_state, options=sent)
        assert_same(first, second)

    simulate(main, ranks)


@pytest.mark.parametrize("broadcasts", [False, True])
def test_whole_values_of_one_device_fill_a_model_of_the_meta_device(broadcasts):
    """A plain model's state dict goes into parameters without values, which then train as ever."""

    def main():
        torch.manual_seed(5)
        plain = Model()
        state = plain.state_dict() if not broadcasts or torch.distributed.get_rank() == 0 else {}
        model, _ = parallel("dp", 3, meta=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
        set_model_state_dict(model, state, options=options)
        assert not any(parameter.is_meta for parameter in model.parameters())
        x = torch.randn(4, 5)
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    simulate(main, 3)


@pytest.mark.parametrize("broadcasts", [False, True])
def test_states_that_do_not_fit_are_refused(broadcasts):
    """Other shapes, and what rank 0 lacks unless strict is off, raise what PyTorch raises; other values stay."""

    def main():
        model, _ = parallel("dp", 2)
        before = {name: value.full_tensor() for name, value in model.named_parameters()}
        whole = {name: value + 1 for name, value in before.items() if name != "scale"}
        options = {"full_state_dict": True, "broadcast_from_rank0": broadcasts}
        if broadcasts:  # PyTorch keeps what a whole state dict of each rank lacks, strict or not
            with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale", "shift"'):
                set_model_state_dict(model, dict(whole), options=StateDictOptions(**options))
        set_model_state_dict(model, dict(whole), options=StateDictOptions(**options, strict=False))
        for name, value in model.named_parameters():
            assert torch.equal(value.full_tensor(), whole.get(name, before[name]))
        whole["up.weight"] = torch.zeros(4, 5)
        with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight: .*\[4, 5\]"):
            set_model_state_dict(model, dict(whole), options=StateDictOptions(**options, strict=False))

    simulate(main, 2)


def test_numbers_and_frozen_parameters():
    """A parameter of zero dims is set as others are; frozen ones are left out on request."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor, self.frozen = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3), requires_grad=False)

    def main():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize_module(Scaled(), mesh, {"": NoParallel()})
        options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        state = get_model_state_dict(model, options=options)
        assert list(state) == ["factor"]
        for broadcasts in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts, strict=False)
            set_model_state_dict(model, {"factor": torch.tensor(4.0 + broadcasts)}, options=options)
            assert isinstance(model.factor, DTensor)
            assert model.factor.full_tensor().item() == 4.0 + broadcasts

    simulate(main, 2)


def _saved_while_written(folder):
    first = parallel("dp", 2)
    trained(*first)
    before = copy.deepcopy(first[0])
    state = {"model": get_model_state_dict(first[0])}
    future = checkpoint.async_save(state, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in first[0].parameters():
            parameter.zero_()
    future.result()
    second = parallel("dp", 2, seed=3)[0]
    state = get_model_state_dict(second)
    checkpoint.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(second, state)
    for mine, theirs in zip(second.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


def test_async_save_has_the_values_of_its_call(tmp_path):
    """``async_save`` on real processes keeps what the model was, while parameters are written."""
    launch(_saved_while_written, 2, args=(str(tmp_path / "checkpoint"),), platform="torch")


def stager_of(blocking):
    """A stager of PyTorch."""
    return BlockingAsyncStager() if blocking else DefaultStager(StagingOptions(False, False, False, False))


def serves_once(blocking):
    """Whether a stager fails from its second state on, as PyTorch 2.12's default one, without DTensors, too."""
    stager = stager_of(blocking)
    stager.stage({"model": {}})
    try:
        stager.stage({"model": {}})
    except KeyError:
        return True
    return False


@pytest.mark.parametrize("blocking", [True, False])
def test_staged_states_are_copies(blocking):
    """Copies have layouts and values, share nothing with the model, and take later values where they are kept."""
    once = serves_once(blocking)

    def main():
        model, optimizer = parallel("both", 4)
        stager = stager_of(blocking)
        for _ in range(2):
            trained(model, optimizer)
            state, _ = get_state_dict(model, optimizer)
            expected = {name: getattr(value, "_local", value).clone() for name, value in state.items()}
            staged = stager.stage({"model": state})["model"]
            stager = stager_of(blocking) if once else stager
            trained(model, optimizer)
            for name, value in state.items():
                assert getattr(staged[name], "layout", None) == getattr(value, "layout", None)
                assert torch.equal(getattr(staged[name], "_local", staged[name]), expected[name])

    simulate(main, 4)

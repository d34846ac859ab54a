"""A run with dropout goes on from a checkpoint, on any mesh, as if it had not been interrupted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel, Shard
from hyper_parallel.core.checkpoint import load, save
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


class Training:
    """A model with dropout, an optimizer, and what a checkpoint of them holds."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        torch.manual_seed(seed)
        hp.manual_seed(seed)
        self.mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.4), nn.Tanh(), nn.Linear(7, 3)).double()
        plan = {"0": ColwiseParallel(use_local_output=False), "3": RowwiseParallel(use_local_output=False)}
        hp.parallelize_module(self.model, self.mesh, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, number: int) -> float:
        """Take a step on the batch of this number, and return its loss."""
        x = torch.randn(11, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        loss = self.model(hp.distribute_tensor(x, self.mesh, [Shard(0), Replicate()])).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().full_tensor().item()

    def state(self) -> dict[str, object]:
        """Return what is saved."""
        return {"model": self.model, "optimizer": self.optimizer, "random": hp.get_rng_state()}


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_masks_go_on_where_they_were(shape, tmp_path):
    """Saved on 2 x 3 ranks after two steps, the next two have the losses of the run that was not interrupted."""

    def uninterrupted():
        training = Training((2, 3), 1)
        first = [training.step(number) for number in range(2)]
        save(training.state(), tmp_path)
        return first + [training.step(number) for number in range(2, 4)]

    def resumed():
        training = Training(shape, 2)  # other weights, other masks
        loaded = load(training.state(), tmp_path)
        hp.set_rng_state(loaded["random"])
        return [training.step(number) for number in range(2, 4)]

    losses = simulate(uninterrupted, 6, platform="torch")[0]
    for later in simulate(resumed, shape[0] * shape[1], platform="torch"):
        torch.testing.assert_close(later, losses[2:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("state", [None, 3, (1,), (1, 2, 3), (1, -2), (1.0, 2), ("1", "2"), (True, 2)])
def test_what_is_no_state_is_refused(state):
    """A state has a seed and a call index, both whole numbers; nothing changes otherwise."""
    before = hp.get_rng_state()
    with pytest.raises(ValueError, match=r"state is .*; it must be what get_rng_state"):
        hp.set_rng_state(state)
    assert hp.get_rng_state() == before

"""Functions that PyTorch composes of others: masked ones have plain values."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import MixedTensorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

VALUES = torch.linspace(-1, 1, 15).reshape(5, 3)
MASK = VALUES.abs() > 0.3


@pytest.mark.parametrize("name", ["sum", "mean", "std", "softmax", "normalize"])
def test_masked_functions_mean_the_same(name):
    """Masked sums, means, deviations, softmaxes and norms are the plain ones."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, mask = distribute_tensor(VALUES, mesh, [Shard(0)]), distribute_tensor(MASK, mesh, [Replicate()])
        args = (2.0, 1) if name == "normalize" else (1,)
        results = getattr(torch.masked, name)(x, *args, mask=mask).full_tensor()
        plain = getattr(torch.masked, name)(VALUES, *args, mask=MASK)
        return torch.allclose(results, plain, equal_nan=True), x.layout is x._layout

    assert simulate(rank, 2, "torch") == [(True, True)] * 2


def test_a_plain_mask_is_refused():
    """A plain mask is refused, although the function makes constants of its own."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(VALUES, mesh, [Shard(0)])
        with pytest.raises(MixedTensorError) as raised:
            torch.masked.sum(x, 1, mask=MASK)
        return str(raised.value)

    (message, _) = simulate(rank, 2, "torch")
    assert message.startswith(
        "argument condition is a plain tensor [5, 3], but other operands are DTensors on DeviceMesh(cpu, tp=2"
    )

"""``torch.amp.GradScaler`` with DTensor parameters, against plain ones."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

PLACES = {
    (2,): [[Shard(0)], [Replicate()], [Shard(1)]],
    (3,): [[Shard(0)], [Replicate()]],
    (2, 2): [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)]],
}


def trained(parameters, inputs):
    """Values and scales after five steps, in the second of which one element of the gradient overflows."""
    optimizer = torch.optim.SGD(parameters, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        target = inputs[1 if step == 1 else 0]
        loss = sum(((p - x) ** 2 * (step + 1)).sum() for p, x in zip(parameters, target, strict=True))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("mesh_shape", PLACES)
def test_five_steps_with_an_overflow(mesh_shape):
    """The step that overflows on one rank is skipped on all; values and scales are those of the plain run."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((5, 3)), rng.standard_normal((3, 2))]
    good = [rng.standard_normal((5, 3)), rng.standard_normal((3, 2))]
    bad = [good[0].copy(), good[1].copy()]
    bad[0][4, 2] = np.inf  # in the last rank's piece
    plain = [torch.tensor(array, requires_grad=True) for array in arrays]
    inputs = [[torch.tensor(one) for one in each] for each in (good, bad)]
    scales = trained(plain, inputs)
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]

    def run():
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
        whole = [[distribute_tensor(one, mesh) for one in each] for each in inputs]
        for places in PLACES[mesh_shape]:
            held = [distribute_tensor(torch.tensor(array).requires_grad_(), mesh, places) for array in arrays]
            assert trained(held, whole) == scales
            assert [list(p.grad.placements) for p in held] == [places] * 2
            for found, exact in zip(held, plain, strict=True):
                torch.testing.assert_close(found.detach().full_tensor(), exact.detach(), rtol=1e-12, atol=1e-12)

    simulate(run, int(np.prod(mesh_shape)), "torch")


def test_what_one_rank_finds_all_know():
    """One all-reduce of one number per mesh; a pending sum is refused, for its parts tell nothing."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        grads = [distribute_tensor(torch.tensor([1.0, 2.0, torch.nan]), mesh, [Shard(0)]), torch.ones(2)]
        found, scale = torch.zeros(1), torch.tensor(0.5)
        with record_events() as log:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        assert [(one.collective, one.argument, one.implicit) for one in log] == [("all_reduce", "found_inf", False)]
        assert found.item() == 1.0
        assert grads[0].full_tensor()[:2].tolist() == [0.5, 1.0]
        assert grads[1].tolist() == [0.5, 0.5]
        owing = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        assert owing.layout is Layout.place(mesh, [Partial()], (2,))
        with pytest.raises(UnsupportedOperatorError) as caught:
            torch._amp_foreach_non_finite_check_and_unscale_([owing], found, scale)
        return str(caught.value)

    assert simulate(run, 2, "torch")[1] == (
        "_amp_foreach_non_finite_check_and_unscale_: gradient 0 is f32[2] + Partial(sum)@tp: whether a pending sum is "
        "finite is not known before it is done; use parameter.grad = parameter.grad.reduce_partial() first"
    )

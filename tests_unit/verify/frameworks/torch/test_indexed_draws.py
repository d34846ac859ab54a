"""Random functions of plain tensors draw the numbers of DTensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.random_draws import SingleDeviceDraws

pytestmark = pytest.mark.platforms("torch")

DRAWS = [
    lambda x: F.dropout(x, 0.3),
    lambda x: F.dropout(x * 1, p=0.3, inplace=True),
    lambda x: F.alpha_dropout(x, 0.3, training=True),
    lambda x: F.rrelu(x, training=True),
    lambda x: torch.dropout(x, 0.3, True),
    torch.rand_like,
    lambda x: F.gumbel_softmax(x, hard=False),
    lambda x: torch.empty_like(x).normal_(),
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_plain_tensors_draw_what_dtensors_draw(draw):
    """Inside the block a plain tensor gets the numbers of a DTensor with the same values; PyTorch's stay unused."""
    platform, place = get_torch_platform(), SingleDeviceDraws(0).place
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4)
    random.manual_seed(5)
    state = torch.get_rng_state()
    with harness_of(platform).indexed_draws(None, place):
        plain = draw(x)
    assert torch.equal(state, torch.get_rng_state())
    assert type(plain) is torch.Tensor
    random.manual_seed(5)
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("single",))
    assert torch.equal(plain, draw(DTensor.from_local(x, mesh, [Replicate()])).to_local())


def test_what_does_not_draw_is_left_alone():
    """Functions that do not draw, in evaluation or with probability 0, count no call and stay plain."""
    log = SingleDeviceDraws(0)
    x = torch.ones(3, 4, requires_grad=True)
    with harness_of(get_torch_platform()).indexed_draws(None, log.place):
        F.dropout(x, 0.5, training=False)
        F.dropout(x, 0.0)
        F.rrelu(x)
        torch.dropout(x, 0.5, False)
        F.scaled_dot_product_attention(x, x, x)
        (x * 2).sum().backward()
    assert log.shapes == {}
    assert x.grad.tolist() == torch.full((3, 4), 2.0).tolist()


def test_an_in_place_dropout_changes_its_operand():
    """The operand of an in-place dropout is the result, with its gradient."""
    leaf = torch.ones(50, requires_grad=True)
    x = leaf * 1
    with harness_of(get_torch_platform()).indexed_draws(None, SingleDeviceDraws(0).place):
        assert F.dropout(x, 0.5, inplace=True) is x
        torch.autograd.backward([x.sum()])
    assert set(leaf.grad.tolist()) == {0.0, 2.0}
    assert leaf.grad.tolist() == x.tolist()


@pytest.mark.parametrize("arguments", [{"gradient": torch.ones(3)}, {"inputs": "x"}])
def test_other_backwards_run_as_they_are(arguments):
    """Backward with a gradient or with inputs runs as PyTorch wrote it."""
    x = torch.ones(3, requires_grad=True)
    arguments = {
        name: [x] if value == "x" else value for name, value in arguments.items() if isinstance(value, str)
    } or arguments
    with harness_of(get_torch_platform()).indexed_draws(None, SingleDeviceDraws(0).place):
        (x * 2 if "gradient" in arguments else (x * 2).sum()).backward(**arguments)
    assert x.grad.tolist() == [2.0] * 3

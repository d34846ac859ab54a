from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.distributed_op import DistributedOp
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.platform.torch import intercept
from hyper_parallel.verify.check import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def spread(whole, mesh, *placements):
    """A leaf DTensor of the global tensor ``whole``."""
    layout = Layout.place(mesh, placements, tuple(whole.shape))
    box = tuple(slice(*one) for one in layout.local_box())
    return get_torch_platform().wrap(whole[box].clone(), layout)


def on_ranks(function, world=2):
    """``function(mesh)`` on every rank of a one-axis mesh."""
    return simulate(lambda: function(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))), world, "torch")


def test_one_interception_per_process():
    """The platform's dispatcher is the one that interception uses, on every call."""
    platform = get_torch_platform()
    assert intercept.interception().dispatcher is platform.dispatcher
    assert intercept.interception() is intercept.interception()


def test_composite_functions_decompose():
    """A function without a rule runs as PyTorch wrote it, operator by operator, and stays differentiable."""
    import numpy as np
    import torch

    assert torch.nn.functional.softsign not in intercept.interception().functions
    x = np.random.default_rng(0).standard_normal((5, 3))
    report = check_function(torch.nn.functional.softsign, [x], (3,), platform="torch", partial=())
    assert report.wrong == report.rejected == []
    assert report.ok


def test_an_unknown_operator_says_what_to_do():
    """An operator without a rule is an UnsupportedOperatorError with the layouts seen and both ways out."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4, 4), mesh, Shard(0))
        with pytest.raises(NotImplementedError) as caught:
            torch.linalg.slogdet(x)
        assert isinstance(caught.value, UnsupportedOperatorError)
        return str(caught.value)

    assert on_ranks(on_rank)[0] == (
        "operator aten._linalg_slogdet.default has no sharding rule (layouts: f32[4@tp, 4]); "
        "add one with hyper_parallel.DistributedOp, or let it run whole on every rank: "
        "hyper_parallel.ReplicatedOp('aten._linalg_slogdet.default')"
    )


def test_users_operators_come_before_decomposition():
    """A function that a user gave a rule under its name is dispatched by it."""
    import torch

    class Softsign(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            assert extra_args == ()
            return layouts[0]

    user = Softsign("softsign")
    try:

        def on_rank(mesh):
            x = spread(torch.arange(5.0), mesh, Shard(0))
            out = torch.nn.functional.softsign(x)
            assert out.layout is x.layout
            return out.full_tensor()

        assert torch.equal(on_ranks(on_rank)[0], torch.nn.functional.softsign(torch.arange(5.0)))
    finally:
        user.unregister()


def test_nothing_comes_back_plain():
    """Operators return DTensors, Python numbers only where PyTorch does."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4, 4), mesh, Replicate())
        for out in (x + 1.0, 1.0 + x, x.sum(), torch.add(x, x), x.view(16), -x, x[0]):
            assert isinstance(out, DTensor)
        assert torch.is_tensor(x)
        assert x.is_floating_point()

    on_ranks(on_rank)

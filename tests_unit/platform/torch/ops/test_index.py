"""Functions that return a Python value of the global tensor."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=repr)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equality_is_the_same_on_every_rank(world_size, placement):
    """``equal`` and ``allclose`` compare global tensors, also if only one rank has a difference."""

    def rank():
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))

        def placed(values, where):
            layout = Layout.place(mesh, [where], values.shape)
            first = mesh.coordinate == (0,)
            local = values if first or not where.is_partial() else torch.zeros_like(values)
            box = tuple(slice(*bounds) for bounds in layout.local_box())
            return DTensor.from_local(local[box].clone(), mesh, [where], shape=values.shape)

        values = torch.arange(35.0).reshape(5, 7)
        other, nan = values.clone(), values.clone()
        other[4, 6] += 1e-3
        nan[4, 6] = float("nan")
        x, y, z = placed(values, placement), placed(values, Shard(0)), placed(other, placement)
        n = placed(nan, Shard(0))
        return (
            torch.equal(x, y),
            torch.equal(x, z),
            torch.equal(x, placed(values[:4], Shard(0))),
            torch.allclose(x, z, rtol=0, atol=1e-2),
            x.allclose(z, rtol=0, atol=1e-4),
            torch.allclose(n, n),
            torch.allclose(n, n, equal_nan=True),
        )

    assert simulate(rank, world_size, "torch") == [(True, False, False, True, False, False, True)] * world_size


@pytest.mark.parametrize(
    "call",
    [
        lambda x, edges: torch.histogram(x.detach(), edges.detach()),
        lambda x, _: torch.histogram(x.detach(), 4, range=(-2.0, 2.0)),
        lambda x, _: torch.histogram(x.detach(), 4, range=(-2.0, 2.0), density=True),
    ],
    ids=["edges", "count", "density"],
)
def test_histograms_are_of_all_values(call):
    """Counts and edges of a histogram are those of the global tensor on every rank."""
    edges = np.linspace(-2, 2, 5)
    report = check_function(call, [np.random.default_rng(0).standard_normal(7), edges], (2,), platform="torch", limit=6)
    assert report.ok, report.wrong[:3] or report.rejected[:3]
    assert not report.rejected

"""Partial(max) and (min) made of a replicated value: every copy attains the extremum, and gradients add up."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.verify.checker.function import all_placements, check_function
from hyper_parallel.verify.simulate import simulate

MESHES = [(2,), (3,), (4,), (2, 2)]


def made_pending(op, dims):
    """A function that is the identity on plain tensors, and goes through ``Partial(op)`` on DTensors."""

    def identity(x):
        if not isinstance(x, DTensor):
            return x * 1
        for placements in ([Partial(op)] * x.device_mesh.ndim, dims * x.device_mesh.ndim):
            x = x.redistribute(x.device_mesh, placements)
        return x * 1

    return identity


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dims", [[Replicate()], [Shard(0)]], ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.untraced
def test_a_fresh_extremum_is_the_identity(platform_name, op, dims, mesh):
    """A value made Partial(max) or (min) and reduced again has its true gradient, not one per copy."""
    values = np.random.default_rng(3).standard_normal((5, 3))
    report = check_function(made_pending(op, dims), [values], mesh, platform=platform_name, partial=("sum", op))
    assert report.ok, report.wrong[:3]
    assert not report.rejected, report.rejected[:3]


def joining(name, platform):
    """``cat`` along dim 0 or ``stack`` along dim 1, spelled as the framework does."""
    if platform == "torch":
        import torch as framework
    else:
        from mindspore import ops as framework
    join = getattr(framework, name)
    return lambda x, y: join([x, y], 0 if name == "cat" else 1)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("name", ["cat", "stack"])
@pytest.mark.untraced
def test_joining_partial_extrema_with_other_placements(platform_name, name, op, mesh):
    """Cat and stack of Partial(max) or (min) with tensors of any placement have the plain gradients."""
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((5, 3)), rng.standard_normal((5, 3))
    every = all_placements(2, len(mesh), partial=(op,))
    pending = [placements for placements in every if Partial(op) in placements]
    join = joining(name, platform_name)
    for choices in ([pending, every], [every, pending]):
        report = check_function(join, [x, y], mesh, platform=platform_name, placements=choices, limit=12)
        assert report.ok, report.wrong[:3]
        assert not report.rejected, report.rejected[:3]


@pytest.mark.platforms("torch")
def test_a_gradient_that_is_not_finite_stays_with_the_winner():
    """Ranks that did not attain the extremum get zero gradient, also where the winner's is infinite or NaN."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = torch.tensor(([0.0, 3.0], [-1.0, 5.0])[mesh.rank], requires_grad=True)
        root = torch.sqrt(DTensor.from_local(mine, mesh, [Partial("max")]).redistribute())
        root.sum().backward()
        return mine.grad.tolist()

    winner, loser = simulate(body, 2, platform="torch")
    assert winner == [float("inf"), 0.0]
    assert loser == [0.0, pytest.approx(0.5 / 5.0**0.5)]

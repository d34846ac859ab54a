from __future__ import annotations

import pytest

from hyper_parallel import (
    Partial,
    Replicate,
    Shard,
    empty,
    full,
    init_device_mesh,
    manual_seed,
    ones,
    rand,
    randn,
    record_events,
    zeros,
)
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def on_mesh(fn, size=3):
    """Run ``fn(mesh)`` on every rank of one axis."""
    return simulate(lambda: fn(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))), size, "torch")


@pytest.mark.parametrize("placements", [None, [Shard(0)], [Shard(1)], [Partial()], ("None", "tp"), [Partial("max")]])
def test_constants_in_every_layout(placements):
    """The global value is the constant for every layout, including uneven shards and Partial, without communication."""
    import torch

    def rank(mesh):
        with record_events() as log:
            tensor = [
                zeros(4, 5, device_mesh=mesh, placements=placements),
                ones((4, 5), device_mesh=mesh, placements=placements, dtype=torch.float64),
                full([4, 5], 3, device_mesh=mesh, placements=placements),
            ]
        assert len(log) == 0
        for value, constant in zip(tensor, (0, 1, 3), strict=True):
            whole = value.full_tensor()
            assert whole.shape == (4, 5)
            assert (whole == constant).all()
        return [str(value.dtype) for value in tensor]

    assert on_mesh(rank)[0] == ["torch.float32", "torch.float64", "torch.int64"]


def test_options():
    """``requires_grad`` makes a leaf, the current mesh is the default, ``empty`` has the shape."""

    def rank(mesh):
        with mesh:
            leaf = ones(4, requires_grad=True)
            assert leaf.is_leaf
            assert leaf.requires_grad
            assert leaf.placements == (Replicate(),)
            assert full(2, 1.5).shape == (2,)
            assert zeros(()).shape == ()
            return empty(5, placements=[Shard(0)]).local_shape

    assert on_mesh(rank) == [(2,), (2,), (1,)]


@pytest.mark.parametrize("make", [zeros, ones, empty, rand, randn])
def test_the_size_may_come_by_keyword(make):
    """``size=`` is the positional size, and giving it twice is an error."""

    def rank(mesh):
        assert make(size=(3, 4), device_mesh=mesh, placements=[Shard(0)]).shape == (3, 4)
        assert make(size=3, device_mesh=mesh).shape == (3,)
        with pytest.raises(TypeError) as caught:
            make(3, size=(3, 4), device_mesh=mesh)
        return str(caught.value)

    assert on_mesh(rank, 1) == ["size: given both by position (3,) and by keyword (3, 4)"]


@pytest.mark.parametrize("make", [rand, randn])
@pytest.mark.parametrize("placements", [None, [Shard(0)], [Shard(1)], [Partial()]])
def test_random_values_do_not_depend_on_layout_or_mesh(make, placements):
    """One seed, one tensor: on three ranks sharded as on one; the second call differs from the first."""
    import torch

    def draw(mesh, local):
        manual_seed(11, mesh)
        first, second = (make(40, 5, device_mesh=mesh, placements=local, dtype=torch.float64) for _ in range(2))
        return first.full_tensor(), second.full_tensor()

    alone = on_mesh(lambda mesh: draw(mesh, None), 1)[0]
    many = on_mesh(lambda mesh: draw(mesh, placements))
    assert all(mine.equal(theirs) for value in many for mine, theirs in zip(value, alone, strict=True))
    assert not alone[0].equal(alone[1])
    low, high = (0, 1) if make is rand else (-6, 6)
    assert low <= alone[0].min() < alone[0].max() < high


def test_random_leaves_in_short_types():
    """Random leaves have the requested dtype and requires_grad, and a uniform value never rounds up to 1."""
    import torch

    def rank(mesh):
        value = rand(999, device_mesh=mesh, placements=[Shard(0)], dtype=torch.bfloat16, requires_grad=True)
        assert value.is_leaf
        assert value.requires_grad
        assert randn(3, device_mesh=mesh).dtype == torch.float32
        return value.dtype == torch.bfloat16 and bool((value.to_local() < 1).all())

    assert all(on_mesh(rank))

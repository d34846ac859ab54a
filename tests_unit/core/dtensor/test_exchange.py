"""What ranks exchange: values and gradients where dims are shorter than the axis, and what a call does per rank."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hyper_parallel.core.dtensor.exchange import Exchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.dtensor.steps import AllToAll
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.platform.select import get_torch_platform, platform_named
from hyper_parallel.verify.simulate import simulate

SIZES = [(2, 7), (3, 10), (1, 5), (4, 3), (7, 2), (1, 1), (0, 3)]


def gradient_of(platform, function, leaf):
    """The gradient of ``leaf`` in the sum that ``function`` computes from it."""
    if platform.platform_type == "mindspore":
        from hyper_parallel import value_and_grad

        return value_and_grad(function, 0)(leaf)[1]
    leaf = leaf.detach().requires_grad_()
    function(leaf).backward()
    return leaf.grad


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (5,), (2, 2), (2, 3)])
def test_values_and_gradients_where_dims_are_shorter_than_the_axis(platform_name, sizes, mesh):
    """Between shards of any dims, along one axis or two, each rank gets its part or nothing, as its gradient does."""
    random = np.random.default_rng(math.prod(mesh))
    value, cotangent = (random.standard_normal(sizes).astype(np.float32) for _ in range(2))
    placements = [(Shard(0),), (Shard(1),)]
    if len(mesh) == 2:
        placements = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(1))]

    def rank():
        platform = platform_named(platform_name)
        grid = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
        results = []
        for source, target in itertools.permutations(placements, 2):
            leaf = distribute_tensor(platform.from_numpy(value), grid, source)
            weight = distribute_tensor(platform.from_numpy(cotangent), grid, target)
            moved = leaf.redistribute(placements=target)
            assert tuple(moved.to_local().shape) == moved.layout.local_shape

            def weighted(x, target=target, weight=weight):
                return (x.redistribute(placements=target) * weight).sum()

            results.append([moved.full_tensor(), gradient_of(platform, weighted, leaf).full_tensor()])
        return [[platform.tensor_to_numpy(each) for each in pair] for pair in results]

    for by_rank in simulate(rank, math.prod(mesh), platform_name):
        for moved, gradient in by_rank:
            np.testing.assert_array_equal(moved, value)
            np.testing.assert_array_equal(gradient, cotangent)


class Counting:
    """PyTorch's platform with a transport that moves nothing: how often a step calls either."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def called(*args, **named):
            self.calls.append(name)
            return getattr(get_torch_platform(), name)(*args, **named)

        return called

    def transport(self):
        """Itself."""
        return self

    def all_to_all(self, x, ranks, sends, expects):
        """Return zeros for what is expected."""
        self.calls.append(("all_to_all", tuple(x.shape), len(ranks), sends.total, expects.total))
        return x.new_zeros(expects.total)

    def reduce_scatter(self, chunks, op, ranks):
        """Return this rank's own chunk."""
        self.calls.append(("reduce_scatter", op, len(ranks), [len(chunk) for chunk in chunks if len(chunk)]))
        return chunks[0].clone()


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("size, rank", [(512, 0), (512, 70), (512, 511), (4096, 5)])
def test_calls_do_not_grow_with_members_that_hold_nothing(dense, size, rank):
    """64 rows over hundreds of ranks to columns, and back: one flat collective, and as many calls for any world."""
    import torch

    grid = dense.grid((size,), rank)
    rows, columns = (Layout.of(grid, dims, (), (64, 100)) for dims in ([(0,), ()], [(), (0,)]))
    for source, target in ((rows, columns), (columns, rows)):
        (step,) = plan_transition(source, target).steps
        assert type(step) is AllToAll
        platform = Counting()
        out = step.apply(torch.ones(source.local_shape), platform)
        assert tuple(out.shape) == target.local_shape
        (collective,) = (call for call in platform.calls if isinstance(call, tuple))
        assert collective[2:] == (size, math.prod(source.local_shape), math.prod(target.local_shape))
        assert len(platform.calls) < 9


@pytest.mark.platforms("torch")
def test_an_exchange_calls_once_for_each_part(dense):
    """Members to which nothing is sent cost no call: 6 rows of a matrix over 8 x 64 ranks, to another order of axes."""
    import torch

    calls = []
    for sizes in ((8, 8), (8, 64)):
        grid = dense.grid(sizes, 1)
        source, target = (Layout.of(grid, [axes, ()], (), (6, 5)) for axes in ((0, 1), (1, 0)))
        platform = Counting()
        step = Exchange(source, target, (0, 1))
        assert step.apply(torch.ones(source.local_shape), platform).shape == target.local_shape
        calls.append(len(platform.calls))
    assert calls[0] == calls[1] < 12

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyper_parallel.core.dtensor import cheapest_steps, exchange, steps
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

WORLDS = [((2,), (7, 5)), ((4,), (1, 4)), ((2, 2), (3, 5)), ((2, 3), (4,)), ((3,), (0, 2))]
KINDS = {steps.Slice, steps.AllGather, steps.ReduceScatter, steps.AllReduce, steps.AllToAll, steps.ToPartial,
         exchange.Exchange, exchange.ReduceExchange}  # fmt: skip


def moves(source, target):
    """The steps that the search considers on the way to ``target``."""
    for kind, dims, partials, axes in itertools.chain(*cheapest_steps._moves_from(source, target)):
        yield kind(source, source.with_axes(dims, partials), axes)


def every_step(dense, mesh, shape, rank):
    """Every step between any two layouts, in the same order on all ranks."""
    grid = dense.grid(mesh, rank)
    layouts = dense.every_layout(grid, shape)
    results = {}
    for source, target in itertools.product(layouts, layouts):
        kept = {axis for axis, _ in target.partials}
        if kept <= {axis for axis, _ in source.partials} and source is not target:
            for step in (cheapest_steps._single_step(source, target), *moves(source, target)):
                results.setdefault(str(step), step)
        fresh = [axis for axis in kept if not source.is_partial(axis) and not any(axis in d for d in source.dim_axes)]
        if source.dim_axes == target.dim_axes and fresh and len(fresh) == len(target.partials) - len(source.partials):
            step = steps.ToPartial(source, target, tuple(fresh))
            results.setdefault(str(step), step)
    return list(results.values())


@pytest.mark.untraced
@pytest.mark.parametrize("mesh, shape", WORLDS)
def test_each_step_alone_keeps_the_value(dense, mesh, shape):
    """Every step, chosen by a plan or not, turns local tensors of its source layout into those of its target."""
    import torch

    seen = every_step(dense, mesh, shape, 0)
    rng = np.random.default_rng(1)
    values = [rng.normal(size=shape) for _ in seen]
    locals_ = [dense.scatter(value, step.source, rng) for value, step in zip(values, seen, strict=True)]

    def on_rank():
        rank = active_transport().rank
        mine = every_step(dense, mesh, shape, rank)
        return [
            step.apply(torch.from_numpy(by_rank[rank]), get_torch_platform()).numpy()
            for step, by_rank in zip(mine, locals_, strict=True)
        ]

    ranks = simulate(on_rank, int(np.prod(mesh)), "torch")
    for index, step in enumerate(seen):
        whole = dense.assemble([results[index] for results in ranks], step.target)
        np.testing.assert_allclose(whole, values[index], atol=1e-10, err_msg=str(step))
    if len(mesh) > 1 and len(shape) > 1:
        assert {type(step) for step in seen} == KINDS


def test_equal_shards_travel_as_rows(dense):
    """Where all members' parts are equal a step is one collective on rows, as large as the worst rank's share."""

    class Rows:
        """A transport that records its calls; it has no collectives on lists."""

        def __init__(self):
            self.calls = []

        def all_gather_rows(self, x, ranks, shapes):
            """Repeat the row."""
            self.calls.append(("all_gather", tuple(x.shape), shapes))
            return x.expand(len(ranks), *x.shape).contiguous()

        def reduce_scatter_rows(self, rows, op, ranks, shapes):
            """Return the first row."""
            self.calls.append(("reduce_scatter", tuple(rows.shape), shapes))
            assert (op, ranks) == ("sum", (0, 1))
            return rows[0]

        def all_to_all_rows(self, rows, ranks, sends, expects):
            """Return the rows."""
            self.calls.append(("all_to_all", tuple(rows.shape), sends + expects))
            assert ranks == (0, 1)
            return rows

    class Platform:
        """PyTorch's, over that transport."""

        def __getattr__(self, name):
            return getattr(get_torch_platform(), name)

        def transport(self):
            """Return the recording transport."""
            return rows

    import torch

    rows, grid = Rows(), dense.grid((2,))
    columns, whole = Layout.of(grid, [(), (0,)], (), (4, 6)), Layout.of(grid, [(), ()], (), (4, 6))
    summed, lines = Layout.of(grid, [(), ()], [(0, "sum")], (4, 6)), Layout.of(grid, [(0,), ()], (), (4, 6))
    shapes = [
        step.apply(torch.zeros(step.source.local_shape), Platform()).shape
        for step in (
            steps.AllGather(columns, whole, (0,)),
            steps.ReduceScatter(summed, columns, (0,)),
            steps.AllToAll(columns, lines, (0,)),
        )
    ]
    assert shapes == [(4, 6), (4, 3), (2, 6)]
    assert rows.calls == [
        ("all_gather", (4, 3), ((4, 3),) * 2),
        ("reduce_scatter", (2, 4, 3), ((4, 3),) * 2),
        ("all_to_all", (2, 2, 3), ((2, 3),) * 4),
    ]


def test_a_step_prints_itself(dense):
    """A step shows its collective, its axes by name and both layouts."""
    grid = dense.grid((2, 2))
    source, target = Layout.of(grid, [(0, 1)], (), (8,)), Layout.of(grid, [()], (), (8,))
    assert str(steps.AllGather(source, target, (0, 1))) == "all_gather over a, b: [8@a@b] -> [8]"
    assert str(steps.Slice(target, source, ())) == "slice: [8] -> [8@a@b]"


def test_steps_know_their_price(dense):
    """The cost of a step is what its worst rank receives and waits for: (7, 5) over four ranks."""
    grid = dense.grid((4,))
    rows, whole = Layout.of(grid, [(0,), ()], (), (7, 5)), Layout.of(grid, [(), ()], (), (7, 5))
    columns, summed = Layout.of(grid, [(), (0,)], (), (7, 5)), Layout.of(grid, [(), ()], [(0, "sum")], (7, 5))
    priced = [
        steps.AllGather(rows, whole, (0,)),
        steps.ReduceScatter(summed, rows, (0,)),
        steps.AllReduce(summed, whole, (0,)),
        steps.AllToAll(rows, columns, (0,)),
        exchange.Exchange(rows, columns, (0,)),
        steps.Slice(whole, rows, ()),
    ]
    assert [(step.received, step.messages, step.launches) for step in priced] == [
        (30, 2, 1), (30, 2, 1), (52, 4, 1), (10, 3, 1), (10, 3, 1), (0, 0, 0),
    ]  # fmt: skip

from __future__ import annotations

import itertools
import math
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hyper_parallel.core.dtensor import exchange, steps
from hyper_parallel.core.dtensor.bounds import (
    all_inside,
    bounds_at,
    member_indices,
    member_ranges,
    shared_sizes,
    shared_volumes,
    volumes,
)
from hyper_parallel.core.dtensor.boxes import (
    box_edges,
    box_transfers,
    contains,
    coordinates,
    intersect,
    mesh_slice,
    reduced_boxes,
    split_at_edges,
    volume,
)
from hyper_parallel.core.dtensor.cheapest_steps import _least_seconds, _moves_from, _single_step, _step_seconds
from hyper_parallel.core.dtensor.exchange import Exchange, ReduceExchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.reduction_assignment import senders_of, sum_parts


def as_slices(box):
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


@st.composite
def layouts(draw, count=1):
    """Layouts of one shape on one mesh, in every order of axes."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh = DeviceMesh.abstract("cpu", sizes, tuple(range(math.prod(sizes))), tuple("abc"[: len(sizes)]))
    sampled = []
    for _ in range(count):
        dims = [[] for _ in shape]
        for axis in draw(st.permutations(range(len(sizes)))):
            dim = draw(st.integers(-1, len(shape) - 1))
            if dim >= 0:
                dims[dim].append(axis)
        sampled.append(Layout.of(mesh, dims, (), shape))
    return sampled


@given(layouts())
def test_boxes_tile_the_index_space_once(sampled):
    """The boxes of all replicas tile the index space exactly once, on uneven and odd meshes, in every order."""
    (layout,) = sampled
    count = np.zeros(layout.shape, int)
    for position in coordinates(layout.mesh):
        count[as_slices(layout.box_at(position))] += 1
    used = {axis for axes in layout.dim_axes for axis in axes}
    replicas = math.prod(size for axis, size in enumerate(layout.mesh.shape) if axis not in used)
    assert (count == replicas).all()


@given(layouts(2))
def test_every_receiver_gets_what_it_lacks_and_nothing_else(pair):
    """Transfers bring each rank exactly the part of its target box that it lacks, from a rank that holds it."""
    source, target = pair
    axes = tuple(range(source.mesh.ndim))
    positions = mesh_slice(source.mesh, axes, (0,) * source.mesh.ndim)
    counts = [np.zeros(source.shape, int) for _ in positions]
    for count, position in zip(counts, positions, strict=True):
        count[as_slices(source.box_at(position))] = 1
    before = [count.copy() for count in counts]
    transfers = box_transfers(source, target, axes, positions[0])
    for transfer in transfers:
        where = as_slices(transfer.box)
        assert (before[transfer.sender][where] == 1).all()
        counts[transfer.receiver][where] += 1
    for count, position in zip(counts, positions, strict=True):
        assert count.max(initial=0) <= 1
        assert (count[as_slices(target.box_at(position))] == 1).all()
    sent = sum(volume(transfer.box) for transfer in transfers)
    lacking = (volume(target.box_at(p)) - volume(intersect(target.box_at(p), source.box_at(p))) for p in positions)
    assert sent == sum(lacking)


@given(layouts(2))
def test_an_exchange_counts_its_peers_without_listing_transfers(pair):
    """An exchange receives one message for each source box of another member that its target box intersects."""
    source, target = pair
    axes = tuple(range(len(source.mesh.shape)))
    positions = mesh_slice(source.mesh, axes, (0,) * len(axes))
    transfers = box_transfers(source, target, axes, positions[0])
    pairs = {(transfer.receiver, transfer.sender) for transfer in transfers}
    peers = Counter(receiver for receiver, _ in pairs)
    assert Exchange(source, target, axes).messages == max(peers.values(), default=0)


@given(layouts(2))
def test_bounds_of_many_ranks_are_their_boxes(pair):
    """Arrays of bounds hold the box of each member, whatever the slice; volumes and containment follow."""
    first, second = pair
    axes = tuple(range(0, first.mesh.ndim, 2))
    origin = tuple(size - 1 for size in first.mesh.shape)
    positions = mesh_slice(first.mesh, axes, origin)
    indices = member_indices(first.mesh, axes, origin)
    bounds, others = bounds_at(first, indices), bounds_at(second, indices)
    boxes = [first.box_at(position) for position in positions]
    shared = [intersect(box, second.box_at(position)) for box, position in zip(boxes, positions, strict=True)]
    for dim, edges in enumerate(bounds):
        starts, stops = (np.broadcast_to(edge, len(positions)) for edge in edges)
        assert [(int(a), int(b)) for a, b in zip(starts, stops, strict=True)] == [box[dim] for box in boxes]
    assert np.broadcast_to(volumes(bounds), len(positions)).tolist() == [*map(volume, boxes)]
    assert np.broadcast_to(shared_volumes(bounds, others), len(positions)).tolist() == [*map(volume, shared)]
    everywhere = coordinates(first.mesh)
    assert all_inside(first, second) == all(contains(first.box_at(p), second.box_at(p)) for p in everywhere)


@given(layouts(2))
def test_ranges_of_few_ranks_are_their_boxes(pair):
    """Without arrays, the ranges of a slice's members are their boxes, and so is what two layouts share of them."""
    first = pair[0]
    axes = tuple(range(0, first.mesh.ndim, 2))
    positions = mesh_slice(first.mesh, axes, (0,) * first.mesh.ndim)
    boxes, others = ([layout.box_at(position) for position in positions] for layout in pair)
    ranges = [member_ranges(layout, axes) for layout in pair]
    for dim in range(first.ndim):
        assert list(ranges[0][dim]) == [box[dim] for box in boxes]
    if first.ndim:
        assert shared_sizes(*ranges) == [volume(intersect(*both)) for both in zip(boxes, others, strict=True)]


@given(layouts(2))
def test_an_exchange_is_priced_alike_with_and_without_arrays(pair):
    """Few ranks are looked at one by one, many as arrays; both give the same loads and messages."""
    axes = tuple(range(pair[0].mesh.ndim))
    with patch.object(exchange, "SMALL", 0), patch.object(steps, "SMALL", 0):
        arrays = Exchange(*pair, axes)
        expected = arrays.load, arrays.messages
    few = Exchange(*pair, axes)
    assert (few.load, few.messages) == expected


def reduction(pair, data):
    """Arguments of a reduction of partial values along random axes, over the whole mesh."""
    source, target = pair
    used = {axis for axes in source.dim_axes for axis in axes}
    free = [axis for axis in range(source.mesh.ndim) if axis not in used]
    reduced = tuple(sorted(data.draw(st.sets(st.sampled_from(free))))) if free else ()
    return source, target, tuple(range(source.mesh.ndim)), reduced, (0,) * source.mesh.ndim


@given(layouts(2), st.data())
def test_sizes_of_parts_are_those_of_the_boxes(pair, data):
    """Arrays of parts name the same reducers, sizes and target boxes as the list of boxes does."""
    source, target, axes, reduced, origin = reduction(pair, data)
    parts = sum_parts(source, target, axes, reduced, origin)
    boxes = reduced_boxes(source, target, axes, reduced, origin)
    rows = zip(parts.reducers.tolist(), parts.sizes.tolist(), parts.needed.tolist(), parts.boxes.tolist(), strict=True)
    members = {number: [] for number in parts.box_of.tolist()}
    for member, number in enumerate(parts.box_of.tolist()):
        members[number].append(member)
    filled = [(box.reducer, volume(box.box), box.reducer in box.receivers, list(box.receivers)) for box in boxes]
    assert sorted((reducer, size, needed, members[number]) for reducer, size, needed, number in rows) == sorted(filled)
    for member, position in enumerate(mesh_slice(source.mesh, axes, origin)):
        senders = {box.reducer for box in boxes if member in box.receivers} - {member}
        counted = senders_of(source, target, axes, position)
        # One more where the rank is among those that could sum its cell, and the cell has too few elements for all.
        assert len(senders) - 1 <= counted <= len(senders)


@given(layouts(2), st.data())
def test_a_reduction_is_priced_alike_with_and_without_arrays(pair, data):
    """Few ranks are looked at one by one, many as arrays; both give the same loads, messages and lower bounds."""
    source, target, axes, reduced, _ = reduction(pair, data)
    partial = Layout.of(source.mesh, source.dim_axes, [(axis, "sum") for axis in reduced], source.shape)
    if reduced and not set(reduced) & {axis for axis, _ in target.partials}:
        few, many = ReduceExchange(partial, target, axes), ReduceExchange(partial, target, axes)
        with patch.object(exchange, "SMALL", 0):
            expected = many.load, many.messages, many.least_received, many.least_messages
        assert (few.load, few.messages, few.least_received, few.least_messages) == expected


@given(layouts(2), st.data())
def test_a_reduction_costs_no_less_than_its_lower_bound(pair, data):
    """The bound by which the search leaves reductions unpriced is not above their price."""
    source, target, axes, reduced, _ = reduction(pair, data)
    partial = Layout.of(source.mesh, source.dim_axes, [(axis, "sum") for axis in reduced], source.shape)
    if reduced and not set(reduced) & {axis for axis, _ in target.partials}:
        step = ReduceExchange(partial, target, axes)
        assert _least_seconds(step) <= _step_seconds(step) * (1 + 1e-12)


def partial_layout(layout, data):
    """The same layout with sums along some of its free axes."""
    used = {axis for axes in layout.dim_axes for axis in axes}
    free = [axis for axis in range(layout.mesh.ndim) if axis not in used]
    chosen = data.draw(st.sets(st.sampled_from(free))) if free else ()
    return Layout.of(layout.mesh, layout.dim_axes, [(axis, "sum") for axis in chosen], layout.shape)


@given(layouts(2), st.data())
def test_moves_are_priced_without_looking_at_every_rank(pair, data):
    """What the worst rank and all ranks receive follows from the sizes of shards; a lower bound of it from fewer."""
    source, target = partial_layout(pair[0], data), pair[1]
    for kind, dims, partials, axes in itertools.chain(*_moves_from(source, target)):
        step = kind(source, source.with_axes(dims, partials), axes)
        of_each = [step.received_at(position) for position in mesh_slice(source.mesh, axes, (0,) * source.mesh.ndim)]
        assert step.load == (max(of_each), sum(of_each) / step.members)
        with patch.object(steps, "SMALL", 0):
            assert kind(source, step.target, axes).load == step.load
        first = [math.prod(layout.local_shape_at((0,) * layout.mesh.ndim)) for layout in (source, step.target)]
        assert 0 <= kind.least_load(*first, step.members) <= step.received


@given(layouts(2), st.data())
def test_a_step_that_beats_an_exchange_costs_no_more(pair, data):
    """Where a collective says that it beats an exchange between the same layouts, its price is not higher."""
    source = partial_layout(pair[0], data)
    for kind, dims, partials, axes in itertools.chain(*_moves_from(source, pair[1])):
        step = kind(source, source.with_axes(dims, partials), axes)
        single = _single_step(source, step.target)
        assert not step.beats_exchange or _step_seconds(step) <= _step_seconds(single)


@given(layouts(2), st.data())
def test_every_part_is_summed_once(pair, data):
    """Reduced boxes tile the index space once; the reducer holds a partial value, and every receiver is listed."""
    source, target, axes, reduced, origin = reduction(pair, data)
    positions = mesh_slice(source.mesh, axes, origin)
    count = np.zeros(source.shape, int)
    for box, reducer, holders, receivers in reduced_boxes(source, target, axes, reduced, positions[0]):
        count[as_slices(box)] += 1
        assert reducer in holders
        assert all(contains(source.box_at(positions[holder]), box) for holder in holders)
        assert receivers == tuple(i for i, p in enumerate(positions) if contains(target.box_at(p), box))
    assert (count == 1).all()


@given(layouts(2))
def test_cells_tile_their_box(pair):
    """Cells are the non-empty parts into which the edges of other boxes split a box."""
    source, target = pair
    edges = box_edges([source.box_at(position) for position in coordinates(source.mesh)], source.ndim)
    for position in coordinates(target.mesh):
        box = target.box_at(position)
        cells = list(itertools.product(*split_at_edges(box, edges)))
        assert all(volume(cell) and contains(box, cell) for cell in cells)
        assert sum(map(volume, cells)) == volume(box)


def test_the_nearest_holder_sends():
    """If several ranks hold a part, the one that shares most coordinates with the receiver sends it."""
    mesh = DeviceMesh.abstract("cpu", (3, 2), tuple(range(6)), ("a", "b"))
    source, target = Layout.of(mesh, [(1,)], (), (4,)), Layout.of(mesh, [()], (), (4,))
    pairs = [(sender, receiver) for _, sender, receiver in box_transfers(source, target, (0, 1), (0, 0))]
    assert pairs == [(1, 0), (0, 1), (3, 2), (2, 3), (5, 4), (4, 5)]


def test_members_come_in_the_order_of_the_axes():
    """Members along axes are listed row-major in the order of the axes, as the mesh lists ranks."""
    mesh = DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("a", "b"))
    assert mesh_slice(mesh, (1, 0), (0, 0)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("shape, inside", [((9, 5), False), ((0, 5), True)])
def test_containment_on_many_ranks(shape, inside):
    """On a mesh of more ranks than a loop takes, boxes are compared at the corners and then everywhere."""
    mesh = DeviceMesh.abstract("cpu", (6, 7), tuple(range(42)), ("a", "b"))
    rows, columns = (Layout.of(mesh, dims, (), shape) for dims in ([(0,), ()], [(), (0,)]))
    assert all_inside(rows, columns) is inside
    assert all_inside(rows, Layout.of(mesh, [(0,), (1,)], (), shape))

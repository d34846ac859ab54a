from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
from hypothesis import given, strategies as st

from hyper_parallel.core.dtensor.boxes import (
    box_edges,
    box_grid,
    box_transfers,
    contains,
    coordinates,
    count_intersections,
    intersect,
    mesh_slice,
    reduced_boxes,
    split_at_edges,
    volume,
)
from hyper_parallel.core.dtensor.exchange import Exchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh


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
    boxes = [source.box_at(position) for position in positions]
    for position in positions:
        box = target.box_at(position)
        intersecting = {other for other in boxes if volume(intersect(box, other))}
        assert count_intersections(box, box_grid(boxes, source.ndim)) == len(intersecting)
    transfers = box_transfers(source, target, axes, positions[0])
    pairs = {(transfer.receiver, transfer.sender) for transfer in transfers}
    peers = Counter(receiver for receiver, _ in pairs)
    assert Exchange(source, target, axes).messages == max(peers.values(), default=0)


@given(layouts(2), st.data())
def test_every_part_is_summed_once(pair, data):
    """Reduced boxes tile the index space once; the reducer holds a partial value, and every receiver is listed."""
    source, target = pair
    used = {axis for axes in source.dim_axes for axis in axes}
    free = [axis for axis in range(source.mesh.ndim) if axis not in used]
    reduced = tuple(data.draw(st.sets(st.sampled_from(free)))) if free else ()
    axes = tuple(range(source.mesh.ndim))
    positions = mesh_slice(source.mesh, axes, (0,) * source.mesh.ndim)
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

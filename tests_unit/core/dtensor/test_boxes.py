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
    members,
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
    mesh = DeviceMesh.grid("cpu", sizes, tuple(range(math.prod(sizes))), tuple("abc"[: len(sizes)]))
    found = []
    for _ in range(count):
        dims = [[] for _ in shape]
        for axis in draw(st.permutations(range(len(sizes)))):
            place = draw(st.integers(-1, len(shape) - 1))
            if place >= 0:
                dims[place].append(axis)
        found.append(Layout.of(mesh, dims, (), shape))
    return found


@given(layouts())
def test_boxes_tile_the_index_space_once(found):
    """The boxes of all replicas tile the index space exactly once, on uneven and odd meshes, in every order."""
    (layout,) = found
    count = np.zeros(layout.shape, int)
    for at in coordinates(layout.mesh):
        count[as_slices(layout.box_at(at))] += 1
    used = {axis for axes in layout.dim_axes for axis in axes}
    replicas = math.prod(size for axis, size in enumerate(layout.mesh.shape) if axis not in used)
    assert (count == replicas).all()


@given(layouts(2))
def test_every_receiver_gets_what_it_lacks_and_nothing_else(pair):
    """Routes bring each rank exactly the part of its target box that it does not hold, from a rank that holds it."""
    source, target = pair
    axes = tuple(range(source.mesh.ndim))
    at = members(source.mesh, axes, (0,) * source.mesh.ndim)
    held = [np.zeros(source.shape, int) for _ in at]
    for index, position in enumerate(at):
        held[index][as_slices(source.box_at(position))] = 1
    before = [one.copy() for one in held]
    for route in box_transfers(source, target, axes, at[0]):
        where = as_slices(route.box)
        assert (before[route.sender][where] == 1).all()
        held[route.receiver][where] += 1
    for index, position in enumerate(at):
        assert held[index].max(initial=0) <= 1
        assert (held[index][as_slices(target.box_at(position))] == 1).all()
    travelled = sum(volume(route.box) for route in box_transfers(source, target, axes, at[0]))
    lacking = (volume(target.box_at(p)) - volume(intersect(target.box_at(p), source.box_at(p))) for p in at)
    assert travelled == sum(lacking)


@given(layouts(2))
def test_an_exchange_knows_its_peers_without_its_routes(pair):
    """A box meets the boxes of a grid that share an element with it; an exchange waits for as many, without its own."""
    source, target = pair
    axes = tuple(range(len(source.mesh.shape)))
    at = members(source.mesh, axes, (0,) * len(axes))
    held = [source.box_at(one) for one in at]
    for one in at:
        box = target.box_at(one)
        assert count_intersections(box, box_grid(held, source.ndim)) == len(
            {other for other in held if volume(intersect(box, other))}
        )
    senders = {(route.receiver, route.sender) for route in box_transfers(source, target, axes, at[0])}
    heard = Counter(receiver for receiver, _ in senders)
    assert Exchange(source, target, axes).messages == max(heard.values(), default=0)


@given(layouts(2), st.data())
def test_every_part_is_added_up_once(pair, data):
    """Pieces of a reduction tile the index space once; the owner holds a summand and everyone who wants it is named."""
    source, target = pair
    used = {axis for axes in source.dim_axes for axis in axes}
    free = [axis for axis in range(source.mesh.ndim) if axis not in used]
    reduced = tuple(data.draw(st.sets(st.sampled_from(free)))) if free else ()
    axes = tuple(range(source.mesh.ndim))
    at = members(source.mesh, axes, (0,) * source.mesh.ndim)
    count = np.zeros(source.shape, int)
    for piece in reduced_boxes(source, target, axes, reduced, at[0]):
        count[as_slices(piece.box)] += 1
        assert piece.owner in piece.group
        assert all(contains(source.box_at(at[one]), piece.box) for one in piece.group)
        assert piece.wanted == tuple(i for i, p in enumerate(at) if contains(target.box_at(p), piece.box))
    assert (count == 1).all()


@given(layouts(2))
def test_cells_tile_their_box(pair):
    """Cells are the non-empty parts into which the edges of other boxes cut a box."""
    source, target = pair
    edges = box_edges([source.box_at(at) for at in coordinates(source.mesh)], source.ndim)
    for at in coordinates(target.mesh):
        box = target.box_at(at)
        cells = list(itertools.product(*split_at_edges(box, edges)))
        assert all(volume(cell) and contains(box, cell) for cell in cells)
        assert sum(map(volume, cells)) == volume(box)


def test_the_nearest_holder_sends():
    """Of several holders of a part the one that shares most coordinates with the receiver sends it."""
    mesh = DeviceMesh.grid("cpu", (3, 2), tuple(range(6)), ("a", "b"))
    source, target = Layout.of(mesh, [(1,)], (), (4,)), Layout.of(mesh, [()], (), (4,))
    found = box_transfers(source, target, (0, 1), (0, 0))
    assert [(route.sender, route.receiver) for route in found] == [(1, 0), (0, 1), (3, 2), (2, 3), (5, 4), (4, 5)]


def test_members_come_in_the_order_of_the_axes():
    """Members along axes are listed row-major in the order in which the axes are given, as the mesh lists ranks."""
    mesh = DeviceMesh.grid("cpu", (2, 3), tuple(range(6)), ("a", "b"))
    assert members(mesh, (1, 0), (0, 0)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    ranks = tuple(mesh.ranks[i * 3 + j] for i, j in members(mesh, (1, 0), (0, 0)))
    assert ranks == mesh.ranks_along((1, 0))

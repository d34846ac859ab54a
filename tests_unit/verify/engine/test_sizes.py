"""Other numbers of ranks: unequal axes, and weights that do not divide evenly."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.sizes import OtherSize, unequal_axes, unequal_sizes, uneven_sizes
from hyper_parallel.verify.frameworks.contract.records import Group, RankRecords, Record, Run


def runs(mesh, *, named=True, width=6, rows=12, sharded=True):
    """Return a run with a weight that the last axis shards, and a batch that the first one shards."""
    sizes = list(mesh.values())
    world = int(np.prod(sizes))
    weight, batch = np.arange(width * 2.0).reshape(width, 2), np.arange(rows * 3.0).reshape(rows, 3)

    def rank(number, place, split):
        part = np.array_split(weight, split[-1])[place[-1]] if sharded else weight
        groups = [] if named else [
            Group(axis, tuple(other for other in range(world) if np.delete(_place(other, sizes), dim).tolist()
                              == np.delete(place, dim).tolist()))
            for dim, axis in enumerate(mesh)
        ]  # fmt: skip
        notes = {"inputs": [(0, "x", np.array_split(batch, split[0])[place[0]])]}
        return RankRecords(number, [Record("weight", "body.weight", "body", -1, 0, part)], groups, notes)

    single = [1] * len(sizes)
    reference = Run([rank(0, single and [0] * len(sizes), single)])
    reference.ranks[0].groups.clear()
    parallel = Run([rank(number, _place(number, sizes), sizes) for number in range(world)])
    return PairedRuns(reference, [reference], parallel, mesh if named else None, None)


def _place(number, sizes):
    return [int(index) for index in np.unravel_index(number, sizes)]


@pytest.mark.parametrize("named", [True, False])
def test_axes_of_equal_size_become_unequal(named):
    """The smallest larger world comes first, then powers of two; the user's names go with the sizes."""
    worlds = unequal_axes(runs({"dp": 2, "tp": 2}, named=named), {"dp": 2, "tp": 2} if named else None)
    if named:
        meshes = [{"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}]
        assert worlds == [OtherSize(mesh["dp"] * mesh["tp"], mesh) for mesh in meshes]
        assert str(worlds[0]) == "6 ranks (dp=2 x tp=3)"
    else:
        assert worlds == [OtherSize(6, None), OtherSize(8, None)]
        assert str(worlds[1]) == "8 ranks"


def test_weights_become_uneven_and_batches_do_not():
    """A larger axis must not divide a sharded weight, and must divide the rows that ranks split."""
    mesh = {"dp": 1, "tp": 2}
    assert uneven_sizes(runs(mesh), "tp", mesh) == [
        OtherSize(4, {"dp": 1, "tp": 4}),
        OtherSize(5, {"dp": 1, "tp": 5}),
    ]
    same = {"fsdp": 2}
    assert uneven_sizes(runs(same), "fsdp", same) == [OtherSize(4, {"fsdp": 4})]
    assert uneven_sizes(runs(same, rows=10), "fsdp", None) == [OtherSize(5, None)]
    assert uneven_sizes(runs(same, sharded=False), "fsdp", same) == []


@pytest.mark.parametrize(
    "mesh, expected",
    [
        ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}),
        ({"dp": 2, "cp": 2, "tp": 2}, {"dp": 2, "cp": 3, "tp": 4}),
        ({"pp": 1, "dp": 1, "tp": 4}, {"pp": 1, "dp": 1, "tp": 4}),
    ],
)
def test_sizes_become_unequal(mesh, expected):
    """Axes of one rank stay; the others get different sizes, none smaller than before."""
    assert unequal_sizes(mesh) == expected

"""Facets *collectives*, *identity* and *groups*: the same values and the same errors on every framework."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

WORLDS = pytest.mark.parametrize("world", [2, 3])
REDUCE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / len(parts),
    "max": lambda parts: parts.max(0),
    "min": lambda parts: parts.min(0),
    "prod": lambda parts: parts.prod(0),
    "all": lambda parts: parts.all(0),
    "any": lambda parts: parts.any(0),
}


def data(world, op="sum", rows=None):
    """What every rank holds, rank first: truths for all and any, else numbers whose sums and products are exact."""
    rng = np.random.default_rng(world)
    shape = (world, *(() if rows is None else (rows,)), 3)
    if op in {"all", "any"}:
        return rng.integers(0, 3, shape) > (0 if op == "all" else 1)
    return rng.integers(-4, 5, shape) / 4 + 0.125


def groups(world):
    """Ways to name ranks of which all are members: the world, a tuple and a list in other orders, some of the ranks."""
    return [None, tuple(range(world))[::-1], [*range(1, world), 0], (world - 1,), tuple(range(world - 1))]


def members(group, world):
    """Global ranks of a group as the test spells it."""
    return list(range(world)) if group is None else list(group)


def run(platform_name, world, rank):
    """Run ``rank(platform)`` on every simulated rank."""

    def on_platform():
        return rank(platform_named(platform_name))

    return simulate(on_platform, world, platform_name)


def refusals(platform, calls):
    """Type and message of each call's error."""
    found = []
    for call in calls:
        with pytest.raises((HyperParallelError, ValueError)) as caught:
            call()
        found.append((type(caught.value).__name__, str(caught.value)))
    return found


def each_group(world, platform, call):
    """Results of ``call(group)`` for every group that has this rank, as numpy, by the group's number."""
    mine = platform.get_rank()
    named = [(number, group) for number, group in enumerate(groups(world)) if mine in members(group, world)]
    return {number: platform.tensor_to_numpy(call(group)) for number, group in named}


def same(found, wanted):
    """Equal in every bit, dtype and shape included."""
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted, strict=True)


@WORLDS
@pytest.mark.parametrize("op", REDUCE)
def test_all_reduce(platform_name, world, op):
    """Every reduction over every group, on every member; the input keeps its values."""
    parts = data(world, op)

    def rank(platform):
        mine = platform.from_numpy(parts[platform.get_rank()].copy())
        found = each_group(world, platform, lambda group: platform.all_reduce(mine, group, op=op))
        return found, platform.tensor_to_numpy(mine)

    for number, (found, mine) in enumerate(run(platform_name, world, rank)):
        same(mine, parts[number])
        assert 0 in found
        for index, value in found.items():
            same(value, np.asarray(REDUCE[op](parts[members(groups(world)[index], world)])))


@WORLDS
@pytest.mark.parametrize("op", REDUCE)
def test_reduce_scatter_tensor(platform_name, world, op):
    """A member gets the slice of its position in the group."""
    parts = data(world, op, rows=6)

    def rank(platform):
        mine = platform.from_numpy(parts[platform.get_rank()].copy())
        return each_group(world, platform, lambda group: platform.reduce_scatter_tensor(mine, group, op=op))

    for number, found in enumerate(run(platform_name, world, rank)):
        for index, value in found.items():
            ranks = members(groups(world)[index], world)
            same(value, np.split(REDUCE[op](parts[ranks]), len(ranks))[ranks.index(number)])


@WORLDS
@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_all_gather_into_tensor_and_broadcast(platform_name, world, dtype):
    """Pieces are concatenated in the group's order; the source is a global rank."""
    parts = data(world, rows=2).astype(dtype)

    def rank(platform):
        mine = platform.from_numpy(parts[platform.get_rank()].copy())
        gathered = each_group(world, platform, lambda group: platform.all_gather_into_tensor(mine, group))
        sent = each_group(world, platform, lambda group: platform.broadcast(mine, members(group, world)[-1], group))
        return gathered, sent, platform.tensor_to_numpy(mine)

    for number, (gathered, sent, mine) in enumerate(run(platform_name, world, rank)):
        same(mine, parts[number])
        assert gathered.keys() == sent.keys()
        for index, value in gathered.items():
            ranks = members(groups(world)[index], world)
            same(value, np.concatenate(parts[ranks]))
            same(sent[index], parts[ranks[-1]])


@WORLDS
def test_all_gather_object(platform_name, world):
    """The list that is given is filled, whatever its length was, in the group's order."""

    def rank(platform):
        everyone, reverse = [None] * world, []
        platform.all_gather_object(everyone, {"rank": platform.get_rank()})
        platform.all_gather_object(reverse, (platform.get_rank(), "x"), tuple(range(world))[::-1])
        return everyone, reverse

    for everyone, reverse in run(platform_name, world, rank):
        assert everyone == [{"rank": one} for one in range(world)]
        assert reverse == [(one, "x") for one in range(world)][::-1]


@WORLDS
def test_identity_and_groups(platform_name, world):
    """Ranks, positions and groups by handle, tuple, list and None agree; a group of the same ranks is the same."""
    turned = (*range(1, world), 0)

    def rank(platform):
        handle = platform.create_group(list(turned))
        platform.barrier()
        platform.barrier(handle)
        mine = platform.get_rank()
        return (
            (mine, platform.get_world_size(), platform.get_backend(), platform.get_backend(handle)),
            [platform.get_process_group_ranks(one) for one in (None, handle, turned, list(turned))],
            [platform.get_group_local_rank(one) for one in (None, handle, turned)],
            [platform.get_global_rank(turned, one) for one in range(world)],
            (platform.create_group(range(world)) == handle, platform.ranks_of(handle) == platform.ranks_of()),
            platform.tensor_to_numpy(platform.all_reduce(platform.from_numpy(np.ones(2)), handle)).tolist(),
        )

    everyone = list(range(world))
    for number, (who, ranks, positions, back, groups_, total) in enumerate(run(platform_name, world, rank)):
        assert who == (number, world, "simulated", "simulated")
        assert ranks == [everyone, everyone, list(turned), list(turned)]
        assert positions == [number, number, turned.index(number)]
        assert back == list(turned)
        assert groups_ == (True, True)
        assert total == [world, world]


@WORLDS
def test_refusals(platform_name, world):
    """What cannot be served is refused on every rank, before anything is sent, with the same words everywhere."""

    def rank(platform):
        mine, x = platform.get_rank(), platform.from_numpy(np.ones((5 * world + 1, 2)))
        other = ((mine + 1) % world,)
        found = refusals(
            platform,
            [
                lambda: platform.reduce_scatter_tensor(x),
                lambda: platform.get_group_local_rank(other),
                lambda: platform.get_global_rank((0, 1), 2),
                lambda: platform.get_global_rank(None, -1),
                lambda: platform.create_group([0, 0]),
                lambda: platform.create_group([0, world]),
                lambda: platform.create_group([]),
            ],
        )
        outside = refusals(
            platform,
            [
                lambda: platform.all_reduce(x, other),
                lambda: platform.all_gather_into_tensor(x, other),
                lambda: platform.all_gather_object([], 1, other),
                lambda: platform.barrier(other),
                lambda: platform.broadcast(x, world),
                lambda: platform.all_reduce(x, op="median"),
                lambda: platform.all_reduce(platform.from_numpy(np.ones(2, np.int64)), op="avg"),
            ],
        )
        return found, outside

    everyone = list(range(world))
    for number, (found, outside) in enumerate(run(platform_name, world, rank)):
        other = [(number + 1) % world]
        assert found == [
            (
                "ValueError",
                f"reduce_scatter_tensor: dim 0 of size {5 * world + 1} does not divide by {world} ranks",
            ),
            ("MeshError", f"get_group_local_rank: rank {number} is not in the group of ranks {other}"),
            ("MeshError", "get_global_rank: group_rank 2 is outside the group of ranks [0, 1]"),
            ("MeshError", f"get_global_rank: group_rank -1 is outside the group of ranks {everyone}"),
            ("MeshError", f"create_group: rank_list [0, 0] must name different ranks of the world of {world}"),
            ("MeshError", f"create_group: rank_list [0, {world}] must name different ranks of the world of {world}"),
            ("MeshError", f"create_group: rank_list [] must name different ranks of the world of {world}"),
        ]
        refused = f"rank {number} calls a collective over ranks ({other[0]},), of which it is no member"
        sourceless = f"broadcast from rank {world}, which is not among ranks {tuple(everyone)}; src is a global rank"
        everywhere = ", ".join(REDUCE)
        average = "the average of integers or booleans is not an integer: use 'sum', or convert to a float first"
        assert outside == [
            *[("CollectiveMismatchError", refused)] * 4,
            ("CollectiveMismatchError", sourceless),
            ("ReductionError", f"unknown reduction 'median'; there are {everywhere}"),
            ("ReductionError", average),
        ]

"""Batches of checks: results per item, and items that end their world."""

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.checker.batch import Failed, World, run_batch

pytestmark = pytest.mark.platforms("torch", "mindspore")


def prepare(offset):
    """Return what runs an item: a number, or what goes wrong on rank 1."""
    transport = active_transport()
    ranks = tuple(range(transport.world_size))

    def run(item):
        if item == "waits" and transport.rank == 1:
            transport.all_gather_object(1, ranks)
        if item == "raises" and transport.rank == 1:
            raise KeyError(item)
        return item, transport.rank + offset

    return run


def outcomes(results):
    """Each item's results, or the error that ended its world."""
    return [type(ranks.error.__cause__).__name__ if isinstance(ranks, Failed) else ranks for ranks in results]


def wanted(item, size):
    """What all ranks return for an item."""
    return [(item, rank + 10) for rank in range(size)]


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.sweep), 3])  # three leave two that wait
def test_an_item_that_ends_the_world_costs_that_item_alone(platform_name, size, in_step):
    """Items before and after one that fails have the results of all ranks, also where ranks are not in step."""
    world = World(platform_name, size, 60.0, in_step=in_step)
    results = run_batch(world, prepare, (10,), [0, 1, "raises", 3, "waits", 5])
    ends = {2: "KeyError", 4: CollectiveMismatchError.__name__}
    if not in_step:  # rank 1 alone joins a collective in the end, which no other item of rank 0 contradicts
        ends[4] = outcomes(results)[4]
        assert isinstance(results[4], Failed)
    expected = [ends.get(number, wanted(number, size)) for number in range(6)]
    assert outcomes(results) == expected


def test_too_many_failures_leave_the_rest_out(platform_name):
    """After the allowed number of failures nothing more is run."""
    results = run_batch(World(platform_name, 2, 60.0), prepare, (10,), ["raises", 1, "raises", 3], 2)
    assert outcomes(results) == ["KeyError", wanted(1, 2), "KeyError"]


def test_results_before_a_failure_are_kept(platform_name):
    """A rank that came to a result of the failed item before the others stopped is reported with it."""
    (failed,) = run_batch(World(platform_name, 2, 60.0), prepare, (10,), ["waits"])
    if platform_name == "torch":
        assert failed.results == [("waits", 10)]


def test_an_empty_batch_starts_no_ranks(platform_name):
    """No item, no world."""
    assert run_batch(World(platform_name, 2, 60.0), prepare, (10,), []) == []

"""Process groups as functions of the package."""

import pytest

import hyper_parallel
from hyper_parallel.errors import MeshError
from hyper_parallel.verify import simulate


def _groups():
    """Split the world of four ranks, but for its last, and return what each rank sees."""
    hyper_parallel.init_process_group()
    hyper_parallel.init_process_group()
    world = hyper_parallel.get_process_group_ranks()
    pair = hyper_parallel.split_group(None, [[0, 2], [1]])
    own = None if pair is None else hyper_parallel.get_process_group_ranks(pair)
    backend = hyper_parallel.get_backend()
    if pair is not None:
        assert hyper_parallel.get_backend(pair) == backend
        hyper_parallel.destroy_process_group(pair)
    return world, own, backend


def test_groups_are_those_of_the_platform(platform_name):
    """Each rank gets its own part of a split world, and none where no list names it."""
    found = simulate(_groups, 4, platform=platform_name)
    assert [world for world, _, _ in found] == [[0, 1, 2, 3]] * 4
    assert [own for _, own, _ in found] == [[0, 2], [1], [0, 2], None]
    assert {backend for *_, backend in found} == {"simulated"}


def _no_group():
    """Destroy what is not a group, and return the error."""
    with pytest.raises(MeshError) as caught:
        hyper_parallel.destroy_process_group(7)
    return str(caught.value)


def test_what_is_not_a_group_is_refused(platform_name):
    """A group is one of the framework's, and known."""
    assert set(simulate(_no_group, 2, platform=platform_name)) == {
        "7 is not a group of this world, or was destroyed; known are the groups of ranks []; create_group builds one"
    }

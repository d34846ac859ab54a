"""Idle threads of MindSpore's pool in ranks."""

import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def _quieted():
    from hyper_parallel.transport import mindspore_threads

    return mindspore_threads.quiet_process()


def test_ranks_find_the_pool_of_the_runtime():
    """The supported MindSpore is the runtime that ranks know how to quiet; another one would cost half of the speed."""
    assert simulate(_quieted, 2, platform="mindspore") == [True, True]
    assert _quieted() is True


@pytest.mark.parametrize("name", ["_MANAGER", "_POOL_CLASS", "_SET_MOST", "_LIBRARY"])
def test_a_runtime_of_other_names_is_left_alone(name, monkeypatch):
    """Where a name is not there, or the library itself, nothing is touched."""
    from hyper_parallel.transport import mindspore_threads

    monkeypatch.setattr(mindspore_threads, name, "_ZN9mindspore7UnknownE")
    assert mindspore_threads._quiet.__wrapped__(0) is False


def test_an_object_of_another_class_is_left_alone(monkeypatch):
    """Only what points to the table of the pool's class is a pool."""
    from hyper_parallel.transport import mindspore_threads

    monkeypatch.setattr(mindspore_threads, "_HEADER", 3)
    assert mindspore_threads._quiet.__wrapped__(0) is False


def test_a_system_that_tells_nothing_is_left_alone(monkeypatch, tmp_path):
    """Without the list of what is loaded nothing is looked for."""
    from hyper_parallel.transport import mindspore_threads

    monkeypatch.setattr(mindspore_threads, "_MAPS", tmp_path / "maps")
    assert mindspore_threads._quiet.__wrapped__(0) is False

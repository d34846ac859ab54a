"""Reports of failed worlds."""

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.failures import world_failed, world_timed_out


def test_equal_errors_are_reported_once():
    """An error that several ranks share is reported once; every other rank has one line."""
    failures = {1: CollectiveMismatchError("differ"), 0: CollectiveMismatchError("differ")}
    error = world_failed(3, failures, {2: "waited in barrier()"})
    assert str(error).splitlines() == [
        "ranks 0, 1 of 3 failed",
        "--- rank 1:",
        "hyper_parallel.errors.CollectiveMismatchError: differ",
        "--- rank 0: same error as rank 1",
        "--- rank 2: waited in barrier()",
    ]
    assert error.failures == failures
    assert error.__cause__ is failures[1]


def test_remote_traces_are_shown_as_they_came():
    """The traceback of another process is shown as that process wrote it."""
    assert "as it came" in str(world_failed(1, {0: ValueError("x")}, {}, {0: "as it came"}))


def test_timeout_shows_stacks_in_rank_order():
    """A timeout shows the stacks in rank order."""
    text = str(world_timed_out(1.5, 2, {1: "b\n", 0: "a\n"}))
    assert text.splitlines() == ["2 ranks did not finish within 1.5 s", "--- rank 0: a", "--- rank 1: b"]

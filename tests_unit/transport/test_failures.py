"""Reports of failed worlds."""

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.failures import exit_text, world_failed, world_timed_out


def test_equal_errors_are_reported_once():
    """An error that several ranks share is reported once; every other rank has one line."""
    failures = {1: CollectiveMismatchError("differ"), 0: CollectiveMismatchError("differ")}
    error = world_failed(3, failures, {2: "waited in barrier()"})
    assert str(error).splitlines() == [
        "ranks 0, 1 of 3 failed",
        "--- ranks 0, 1:",
        "hyper_parallel.errors.CollectiveMismatchError: differ",
        "--- rank 2: waited in barrier()",
    ]
    assert error.failures == failures
    assert error.__cause__ is failures[1]


def test_remote_traces_are_shown_as_they_came():
    """The traceback of another process is shown as that process wrote it."""
    assert "as it came" in str(world_failed(1, {0: ValueError("x")}, {}, {0: "as it came"}))


def test_equal_tracebacks_are_folded():
    """Ranks that failed in the same way share one traceback, whatever the addresses in it; others have their own."""
    same = "File train.py, line 3\nValueError: <object at 0x7f{}0>"
    failures = dict.fromkeys((2, 0, 1, 3), ValueError("x"))
    traces = {0: same.format(0), 1: "TypeError: y", 2: same.format("a"), 3: same.format("b")}
    assert str(world_failed(4, failures, {}, traces)).splitlines() == [
        "ranks 0, 1, 2, 3 of 4 failed",
        "--- ranks 0, 2, 3:",
        "File train.py, line 3",
        "ValueError: <object at 0x7fa0>",
        "--- rank 1:",
        "TypeError: y",
    ]


def test_the_odd_rank_comes_first():
    """A rank that differs from the majority is the first failure; the others have the same error."""
    failures = {rank: CollectiveMismatchError("rank 2 disagrees") for rank in (0, 1, 2)}
    for error in failures.values():
        error.odd_ranks = (2,)
    traces = {rank: f"line {rank}\nrank 2 disagrees" for rank in failures}
    error = world_failed(3, failures, {}, traces)
    assert list(error.failures) == [2, 0, 1]
    assert str(error).splitlines() == [
        "ranks 0, 1, 2 of 3 failed",
        "--- rank 2:",
        "line 2",
        "rank 2 disagrees",
        "--- ranks 0, 1: same error as rank 2",
    ]


def test_signals_have_names():
    """A process that a signal ended is described with the signal's name."""
    assert [exit_text(code) for code in (3, -9, -11, -65)] == [
        "with exit code 3",
        "of SIGKILL",
        "of SIGSEGV",
        "of signal 65",
    ]


def test_timeout_names_the_ranks_that_ran_on():
    """The ranks that hang are named, are the failures and come first; then the others in rank order."""
    error = world_timed_out(1.5, {2: "returned\n", 0: "returned\n", 1: "was running in\nb\n"}, [1])
    assert str(error).splitlines() == [
        "rank 1 of 3 did not finish within 1.5 s",
        "--- rank 1: was running in",
        "b",
        "--- rank 0: returned",
        "--- rank 2: returned",
    ]
    assert list(error.failures) == [1]


def test_timeout_shows_stacks_in_rank_order():
    """Where it is not known which ranks hang, all are named, in rank order."""
    text = str(world_timed_out(1.5, {1: "b\n", 0: "a\n"}))
    assert text.splitlines() == ["2 ranks did not finish within 1.5 s", "--- rank 0: a", "--- rank 1: b"]

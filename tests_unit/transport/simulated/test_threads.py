"""Simulated ranks as threads: isolation, order and error messages."""

import contextlib
import contextvars
import functools
import random
import threading
import time

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.base import Parts, active_transport
from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.threads import run_threads

AMBIENT = contextvars.ContextVar("ambient", default="nothing")


def run(body, world_size=3, timeout=240.0):
    """Run on numpy arrays; ``body`` gets its transport and all ranks."""
    return run_threads(lambda: body(active_transport(), tuple(range(world_size))), world_size, NumpyOps(), timeout)


def failure(body, world_size=3, timeout=240.0):
    """The error with which the world fails."""
    with pytest.raises(RankFailedError) as caught:
        run(body, world_size, timeout)
    assert isinstance(caught.value, WorldFailedError)
    return caught.value


def test_results_are_in_rank_order():
    """Each rank runs once, and results come in rank order."""
    assert run(lambda t, _: (t.rank, t.world_size, t.backend)) == [(rank, 3, "simulated") for rank in range(3)]


def test_in_place_writes_do_not_leak():
    """A rank that overwrites its tensor after a collective changes no other rank's result."""

    def body(t, ranks):
        x = np.full(4, float(t.rank))
        parts = t.all_gather(x, ranks, [(4,)] * 3)
        total = t.all_reduce(x, "sum", ranks)
        rows = np.concatenate([x, x, x])
        moved = t.all_to_all(rows, ranks, Parts.of([(4,)] * 3), Parts.of([(4,)] * 3))
        broadcasted = t.broadcast(x, 0, ranks)
        for result in (*parts, total, moved, broadcasted, x, rows):
            before = result.copy()
            result[:] = 99
            t.barrier(ranks)
            result[:] = before
        return [part[0] for part in parts], total[0], moved[::4].tolist(), broadcasted[0]

    assert run(body) == [([0, 1, 2], 3, [0, 1, 2], 0)] * 3


def test_sent_tensors_may_be_reused():
    """After send the sender may write into its tensor."""

    def body(t, _):
        x = np.ones(2)
        if t.rank == 0:
            t.send(x, 1)
            x[:] = 7
            return None
        return t.recv(x, 0).tolist()

    assert run(body, 2) == [None, [1, 1]]


def test_exactly_one_rank_runs_at_a_time():
    """No two ranks ever run at once, and the order is the same in every run."""

    def trace():
        log, inside = [], []

        def body(t, ranks):
            for step in range(5):
                inside.append(t.rank)
                assert inside == [t.rank]
                time.sleep(0.0005)
                log.append((t.rank, step))
                inside.remove(t.rank)
                t.barrier(ranks if step % 2 else ranks[::-1])

        run(body)
        return log

    assert trace() == trace()


def test_rank_starts_with_an_empty_context():
    """A rank sees no context variable of its surroundings, and leaves none behind."""
    AMBIENT.set("outside")

    def body(t, ranks):
        seen = AMBIENT.get()
        AMBIENT.set(str(t.rank))
        t.barrier(ranks)
        return seen, AMBIENT.get()

    assert run(body) == [("nothing", str(rank)) for rank in range(3)]
    assert AMBIENT.get() == "outside"
    assert active_transport() is None


@pytest.mark.parametrize(
    "first, second, what",
    [
        (lambda t, r: t.barrier(r), lambda t, r: t.all_reduce(np.ones(2), "sum", r), "operation"),
        (lambda t, r: t.all_reduce(np.ones(2), "sum", r), lambda t, r: t.all_reduce(np.ones(3), "sum", r), "shape"),
        (
            lambda t, r: t.all_reduce(np.ones(2), "sum", r),
            lambda t, r: t.all_reduce(np.ones(2, np.int64), "sum", r),
            "dtype",
        ),
        (
            lambda t, r: t.all_reduce(np.ones(2), "sum", r),
            lambda t, r: t.all_reduce(np.ones(2), "max", r),
            "reduction",
        ),
        (lambda t, r: t.broadcast(np.ones(2), 0, r), lambda t, r: t.broadcast(np.ones(2), 1, r), "src"),
    ],
)
def test_divergence_is_reported_by_name(first, second, what):
    """Ranks that diverge in operation, shape, dtype, reduction or source are named, each with its call site."""
    error = failure(lambda t, r: (second if t.rank == 2 else first)(t, r))
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert f"rank 2 disagrees with ranks 0, 1 about the {what}" in str(error)
    assert next(iter(error.failures)) == 2
    assert str(error.__cause__).count(f"at {__file__}:") == 2


def test_sequence_is_counted_per_group():
    """Collectives are numbered per group, so that the message names the one that differs."""

    def body(t, ranks):
        t.barrier(ranks)
        t.barrier(ranks)
        t.all_reduce(np.ones(t.rank + 1), "sum", ranks)

    assert "collective 2 of ranks (0, 1)" in str(failure(body, 2))


def test_own_traceback_comes_first():
    """The failing rank's traceback comes first; every other rank is one line with the collective that it waited in."""

    def body(t, ranks):
        if t.rank == 1:
            raise KeyError("lost")
        t.barrier(ranks)

    error = failure(body)
    lines = str(error).splitlines()
    assert lines[:2] == ["rank 1 of 3 failed", "--- rank 1:"]
    assert "KeyError: 'lost'" in lines
    assert any(line.startswith("--- rank 0: waited in barrier()") for line in lines)
    assert list(error.failures) == [1]
    assert error.__cause__ is error.failures[1]


def test_exit_of_a_rank_is_its_failure():
    """A rank that calls sys.exit has failed; it does not end the process."""

    def body(t, ranks):
        if t.rank == 0:
            raise SystemExit(3)
        t.barrier(ranks)

    assert isinstance(failure(body).failures[0], SystemExit)


def test_rank_code_cannot_swallow_the_end_of_its_world():
    """A rank that catches every Exception and does so again and again is unwound nevertheless."""

    def body(t, ranks):
        if t.rank == 1:
            raise ValueError("x")
        while True:
            with contextlib.suppress(Exception):
                t.barrier(ranks)

    assert list(failure(body).failures) == [1]


def test_errors_while_unwinding_are_not_failures():
    """An error in a rank's clean-up, after another rank failed, is not reported as a failure."""

    def body(t, ranks):
        if t.rank == 1:
            raise ValueError("x")
        try:
            t.barrier(ranks)
        finally:
            {}["gone"]

    assert list(failure(body).failures) == [1]


def test_returning_early_is_reported():
    """A rank that returns without joining is named at once."""
    error = failure(lambda t, ranks: None if t.rank == 1 else t.barrier(ranks))
    assert "rank 1 returned without joining collective 0 of ranks (0, 1, 2)" in str(error)


def test_deadlock_is_reported_at_once():
    """Ranks that wait for each other crosswise fail at once instead of hanging."""
    error = failure(lambda t, ranks: t.barrier(ranks if t.rank else ranks[::-1]), 2)
    assert "deadlock" in str(error)
    assert "did not finish within" not in str(error)


def test_lost_messages_are_told():
    """A message that nobody receives fails the run."""
    error = failure(lambda t, _: t.send(np.ones(1), 1) if t.rank == 0 else None, 2)
    assert "rank 0: send(f64[1], dst=1, tag=0) was never received" in str(error)


def test_a_rank_that_stands_in_the_library_shows_the_librarys_frames():
    """Frames of the library are left out of a stack, unless nothing else would be left."""
    with pytest.raises(WorldFailedError) as caught:
        run_threads(functools.partial(time.sleep, 3), 1, NumpyOps(), 0.5)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["rank 0 of 1 did not finish within 0.5 s", "--- rank 0: was running in"]
    assert "threads.py" in lines[-2]
    assert lines[-1] == "    return self._body()"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_thread_ended_without_a_result_is_reported(monkeypatch):
    """A rank whose thread has no frame does not run."""

    def failing(coordinator, after):
        if after < 0:
            return 0
        raise MemoryError

    monkeypatch.setattr(Coordinator, "next_rank", failing)
    with pytest.raises(WorldFailedError) as caught:
        run_threads(int, 1, NumpyOps(), 0.5)
    assert str(caught.value) == "rank 0 of 1 did not finish within 0.5 s\n--- rank 0: had ended without a result"


def test_timeout_shows_every_stack_and_ends_the_ranks():
    """A run beyond its time shows every rank's stack, and its threads end."""

    def body(t, ranks):
        while t.rank == 1:
            time.sleep(0.001)
        t.barrier(ranks)

    error = failure(body, timeout=5.0)
    assert str(error).splitlines()[:2] == ["rank 1 of 3 did not finish within 5 s", "--- rank 1: was running in"]
    assert "rank 0: waited in barrier()" in str(error)
    assert str(error).endswith("--- rank 2: had not started")
    assert "time.sleep(0.001)" in str(error)
    assert "threading.py" not in str(error)
    assert list(error.failures) == [1]
    assert isinstance(error.failures[1], TimeoutError)
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("rank-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_caught_mismatch_lets_the_world_go_on():
    """Ranks that all catch a mismatch may go on and communicate."""

    def body(t, ranks):
        with pytest.raises(CollectiveMismatchError):
            t.all_reduce(np.ones(t.rank), "sum", ranks)
        return t.all_reduce(np.ones(1), "sum", ranks)[0]

    assert run(body) == [3, 3, 3]


def test_simulations_nest():
    """A rank may run a simulation of its own."""
    outer = run(lambda t, ranks: (run(lambda i, _: i.rank, 2), t.all_reduce(np.ones(1), "sum", ranks)[0]))
    assert outer == [([0, 1], 3)] * 3


@pytest.mark.parametrize("seed", range(5))
def test_random_programs_equal_numpy(seed):
    """Random sequences of collectives over random groups, shapes and orders give what numpy gives."""
    world_size = random.Random(seed).choice([2, 3, 4])  # noqa: S311 - test data

    def body(t, ranks):
        plan, results = random.Random(seed), []  # noqa: S311 - test data, the same on every rank
        for step in range(20):
            members = tuple(plan.sample(ranks, plan.randint(1, world_size)))
            shapes = [(plan.randint(0, 3), 2) for _ in members]
            op = plan.choice(["sum", "max", "min", "avg"])
            if t.rank not in members:
                continue
            data = {rank: np.random.default_rng([seed, step, rank]).standard_normal((3, 2)) for rank in members}
            mine = data[t.rank]
            me = members.index(t.rank)
            parts = t.all_gather(mine[: shapes[me][0]], members, shapes)
            want = [data[rank][: shapes[i][0]] for i, rank in enumerate(members)]
            results.append(all(np.array_equal(a, b) for a, b in zip(parts, want, strict=True)))
            got = t.reduce_scatter([mine[: shape[0]] for shape in shapes], op, members)
            want_one = NumpyOps().reduce([data[rank][: shapes[me][0]] for rank in members], op)
            results.append(np.array_equal(got, want_one))
        return results

    for results in run(body, world_size):
        assert all(results)

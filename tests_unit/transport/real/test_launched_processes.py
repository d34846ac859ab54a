"""Ranks of a real world as warm processes."""

import multiprocessing
import os
import signal
import time

import pytest

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.real import cluster, launched_processes
from hyper_parallel.transport.real.launched_processes import close_launched_teams, run_launched
from hyper_parallel.transport.serialization import pack
from workshop.conformance.transport import check_transport


@pytest.fixture(autouse=True)
def _carrier(request):
    """Skip MindSpore's real ranks on CPU if PyTorch's gloo is missing."""
    if "platform_name" in request.fixturenames:
        require_transport(request.getfixturevalue("platform_name"))


def run(fn, platform, world_size=2, args=(), timeout=240.0):
    """Run a function on a warm world, and assert that it does not fail."""
    done = run_launched(pack((fn, args), fn), world_size, platform, timeout)
    assert done.failure is None, str(done.failure)
    return done


def test_every_collective_equals_numpy(platform_name):
    """The check in front of each collective changes none of its results."""
    results = run(check_transport, platform_name, 3, (platform_name,)).results
    assert all(len(value) > 100 for value in results)


def _uneven_sums():
    """Blocking and started sums over ranks in descending order, of uneven and of empty chunks.

    gloo is trusted to reduce float64 itself, as NCCL and HCCL are.
    """
    import torch

    from hyper_parallel.transport.real.c10d.row_collectives import DTYPES

    DTYPES["gloo"] = frozenset({torch.float64})
    try:
        return _summed()
    finally:
        del DTYPES["gloo"]


def _summed():
    import torch

    t = active_transport()
    ranks, place = (2, 1, 0), 2 - t.rank
    x = torch.arange(5, dtype=torch.float64, requires_grad=True) + t.rank
    chunks = [torch.full((size,), 10.0 * t.rank + size, dtype=torch.float64) for size in (3, 0, 2)]
    results = []
    for op in ("sum", "avg", "max"):
        scattered = t.reduce_scatter(chunks, op, ranks), t.start("reduce_scatter", chunks, op, ranks).wait()
        total = t.all_reduce(x, op, ranks), t.start("all_reduce", x, op, ranks).wait()
        assert torch.equal(*scattered)
        assert torch.equal(*total)
        assert scattered[0].shape == chunks[place].shape
        assert not total[0].requires_grad
        results.append((scattered[0].tolist(), total[0].tolist()))
        rows = torch.stack([torch.full((2,), 10.0 * t.rank + size, dtype=torch.float64) for size in (3, 0, 2)])
        kept = t.reduce_scatter_rows(rows.requires_grad_(), op, ranks, ((2,),) * 3)
        assert kept.tolist() == [{"sum": 30.0 + 3 * size, "avg": 10.0 + size, "max": 20.0 + size}[op] for size in
                                 [(3, 0, 2)[place]] * 2]  # fmt: skip
        assert not kept.requires_grad
    empty = t.reduce_scatter([x.detach()[:0]] * 3, "sum", ranks)
    return results, tuple(empty.shape), x.tolist()


@pytest.mark.platforms("torch")
def test_what_the_engine_reduces_itself_is_the_sum():
    """The engine's own all-reduce and reduce-scatter, blocking or started: uneven, empty chunks, ranks in any order."""
    sums = [[30.0 + 3 * size] * size for size in (3, 0, 2)]
    for rank, (results, empty, x) in enumerate(run(_uneven_sums, "torch", 3).results):
        own = sums[2 - rank]
        whole = [3.0 * value + 3.0 for value in range(5)]
        assert results[0] == (own, whole)
        assert results[1] == ([value / 3 for value in own], [value / 3 for value in whole])
        assert results[2] == ([20.0 + size for size in [len(own)] * len(own)], [value + 2.0 for value in range(5)])
        assert empty == (0,)
        assert x == [float(value + rank) for value in range(5)]


def test_processes_are_reused_and_printing_is_kept_apart(platform_name):
    """Two runs are served by the same processes; each run has what its ranks printed, and what they called."""

    def body():
        transport = active_transport()
        print("rank", transport.rank)  # noqa: T201 - what is tested
        transport.barrier((0, 1))
        return os.getpid()

    first, second = run(body, platform_name), run(body, platform_name)
    assert first.results == second.results
    assert second.outputs == ["rank 0\n", "rank 1\n"]
    assert all(len(calls) == 1 and calls[0].startswith("barrier() at ") for calls in second.history)


def test_variables_of_one_run_do_not_reach_the_next(platform_name, monkeypatch):
    """Ranks see this process's environment as it is now, not as it was."""

    def body():
        return os.environ.get("HP_LIVE_PROBE")

    monkeypatch.setenv("HP_LIVE_PROBE", "1")
    assert run(body, platform_name).results == ["1", "1"]
    monkeypatch.delenv("HP_LIVE_PROBE")
    assert run(body, platform_name).results == [None, None]


def test_messages_are_matched(platform_name):
    """A rank that waits for a message gets an error when the sender returns without sending it."""

    def body():
        transport = active_transport()
        if transport.rank == 0:
            transport.all_gather_object(None, (0, 1))
            transport.recv(make(), 1)
        else:
            transport.all_gather_object(None, (0, 1))

    def make():
        import numpy as np

        from hyper_parallel.platform.select import platform_named

        return platform_named(platform_name).from_numpy(np.ones(2, "float32"))

    done = run_launched(pack((body, ()), body), 2, platform_name, 240.0)
    assert "rank 1 returned without sending what rank 0 waits for" in str(done.failure)


def test_a_refused_message_is_not_received_later(platform_name):
    """A message of an unexpected size is refused whatever its size, and the next receive gets the next message."""

    def body():
        import numpy as np

        from hyper_parallel.platform.select import platform_named

        platform, transport = platform_named(platform_name), active_transport()

        def make(size, value=0.0):
            return platform.from_numpy(np.full(size, value))

        if transport.rank == 0:
            for size in (2, 300_000, 2):
                transport.send(make(size, float(size)), 1)
            return transport.send(make(2, 7.0), 1)
        errors = []
        for receive in (transport.recv, lambda *arguments: transport.start("recv", *arguments).wait(), transport.recv):
            with pytest.raises(CollectiveMismatchError) as caught:
                receive(make(3), 0)
            errors.append(str(caught.value).splitlines()[0])
        return errors, platform.tensor_to_numpy(transport.recv(make(2), 0)).tolist()

    errors = "ranks 0 and 1 disagree about the shape of a message:"
    assert run(body, platform_name).results == [None, ([errors] * 3, [7.0, 7.0])]


def test_too_many_idle_ranks_are_ended(platform_name, monkeypatch):
    """A new world makes room by ending idle ones, the largest first."""
    close_launched_teams()
    monkeypatch.setattr(launched_processes, "_MAX_PROCESSES", 3)
    first = run(os.getpid, platform_name, 2).results
    run(os.getpid, platform_name, 1)
    third = run(os.getpid, platform_name, 2).results
    assert third == first
    run(os.getpid, platform_name, 3)
    assert not {child.pid for child in multiprocessing.active_children()} & set(first)
    close_launched_teams()


def test_a_world_that_cannot_be_joined_says_why(platform_name, monkeypatch):
    """A device that this machine does not have is an error that names the rank, at once."""
    monkeypatch.setattr(cluster, "FRESH", "rehearsal")  # fresh interpreters take seconds to import MindSpore
    with pytest.raises(RankFailedError, match=r"rank 0 of 1 could not join its world: "):
        run_launched(pack((os.getpid, ())), 1, platform_name, 10.0, "npu")


def test_a_rank_that_fails_outside_its_function_says_why(platform_name):
    """An error between two tasks, here a broken output stream, is reported with its traceback."""

    def body():
        import sys

        class Broken:
            def flush(self):
                raise ValueError("full")

        if active_transport().rank:
            sys.stdout = Broken()

    failed = str(run_launched(pack((body, ()), body), 2, platform_name, 240.0).failure)
    assert "--- rank 1:\nrank 1 died with exit code 1; it was not in a communication call\nTraceback" in failed
    assert "ValueError: full" in failed
    assert failed.endswith("--- rank 0: returned")


def _ended(pid):
    """Return the exit code of the process after SIGTERM."""
    (child,) = [child for child in multiprocessing.active_children() if child.pid == pid]
    os.kill(pid, signal.SIGTERM)
    child.join(60)
    return child.exitcode


def test_a_dead_idle_rank_is_replaced(platform_name):
    """A process that died between two runs fails no run, and a signal ends an idle rank."""
    first = run(os.getpid, platform_name).results
    assert _ended(first[1]) == -signal.SIGTERM
    assert first[1] not in run(os.getpid, platform_name).results


@pytest.mark.platforms("torch")
def test_a_signal_that_does_not_interrupt_the_wait_is_handled():
    """A signal in another thread of an idle rank, or just before it waits, is handled before its next task."""

    def body():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # of the thread that waits for tasks
        return os.getpid()

    first = run(body, "torch", 1).results
    assert _ended(first[0]) == 7


def test_started_collectives_keep_their_order(platform_name):
    """Ranks that wait in different orders, or start later, run their group's collectives in one order."""

    def body():
        import numpy as np

        from hyper_parallel.platform.select import platform_named

        platform, rank = platform_named(platform_name), active_transport().rank
        x = platform.from_numpy(np.full(2, rank + 1.0))
        first = platform.all_reduce(x, None, True)[1]
        if rank:
            total = platform.tensor_to_numpy(first.wait()).tolist()
            largest = platform.all_reduce(x, None, True, op="max")[1]
        else:
            largest = platform.all_reduce(x, None, True, op="max")[1]
            total = platform.tensor_to_numpy(first.wait()).tolist()
        return total, platform.tensor_to_numpy(largest.wait()).tolist()

    assert run(body, platform_name).results == [([3, 3], [2, 2])] * 2


@pytest.mark.platforms("torch")
def test_torchs_own_collectives_work_as_before():
    """Correct direct calls of torch.distributed give the same results as without the check."""

    def body():
        import torch
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()
        total = torch.full((2,), float(rank + 1))
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        parts = [torch.empty(1) for _ in range(size)]
        dist.all_gather(parts, torch.tensor([float(rank)]))
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        handle = dist.all_reduce(torch.ones(1), async_op=True)
        handle.wait()
        root = torch.tensor([rank])
        dist.broadcast(root, src=1)
        dist.gather(root, [torch.empty_like(root) for _ in range(size)] if rank == 0 else None)
        dist.scatter(root, [torch.tensor([1])] * size if rank == 2 else None, src=2)
        dist.gather_object(rank, [None] * size if rank == 0 else None)
        named = [rank]
        dist.scatter_object_list(named, [1, 1, 1] if rank == 0 else None)
        dist.broadcast_object_list(named, src=1)
        assert named == [1]
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.barrier(group=pair)
        dist.barrier()
        return total.tolist(), [part.item() for part in parts], objects, root.item()

    expected = ([3.0, 3.0], [0.0, 1.0, 2.0], [{"rank": 0}, {"rank": 1}, {"rank": 2}], 1)
    assert run(body, "torch", 3).results == [expected] * 3


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "mistake, message",
    [
        ("dist.barrier()", "disagree about the operation"),
        ("None", "rank 1 returned without joining"),
    ],
)
def test_mistakes_in_torchs_own_collectives_are_reported(mistake, message):
    """A mismatch between direct calls of torch.distributed is found, and fails the run."""

    def body():
        import torch
        import torch.distributed as dist

        names = {"torch": torch, "dist": dist}
        eval(mistake if dist.get_rank() == 1 else "dist.all_reduce(torch.ones(2))", names)  # noqa: S307

    failure = str(run_launched(pack((body, ()), body), 2, "torch", 240.0).failure)
    assert message in failure
    assert "dist.all_reduce(f32[2], SUM)" in failure
    assert "in body" in failure


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "mistake, message",
    [
        ("dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX, async_op=True).wait()", "about the reduction"),
        ("dist.all_reduce(torch.ones(3), async_op=True)", "disagree about the shape"),
        ("None", "rank 1 returned without joining"),
    ],
)
def test_mistakes_in_started_collectives_are_reported(mistake, message):
    """A mismatch of `async_op` collectives is found although nobody waits; gloo would add to a maximum silently."""

    def body():
        import torch
        import torch.distributed as dist

        names = {"torch": torch, "dist": dist}
        right = "dist.all_reduce(torch.ones(2), async_op=True).wait()"
        eval(mistake if dist.get_rank() == 1 else right, names)  # noqa: S307

    failure = run_launched(pack((body, ()), body), 2, "torch", 300.0).failure
    assert isinstance(failure.__cause__, CollectiveMismatchError)
    assert message in str(failure)
    assert "rank 0: dist.all_reduce(f32[2], SUM) at <string>:1" in str(failure)


def _unreadable():
    raise ArithmeticError("no result can be made of it")


class _Unreadable:
    """A value that can be pickled, but not unpickled."""

    def __reduce__(self):
        return _unreadable, ()


@pytest.mark.platforms("torch")
def test_remains_of_a_run_are_reported():
    """A result that cannot be unpickled is an error of its own; a started message without receiver fails the run."""
    with pytest.raises(ArithmeticError, match="no result can be made of it"):
        run_launched(pack((_Unreadable, ()), _Unreadable), 2, "torch", 240.0)

    def sends():
        import torch

        transport = active_transport()
        if transport.rank == 1:
            transport.start("send", torch.ones(2), 0)

    done = run_launched(pack((sends, ()), sends), 2, "torch", 240.0)
    lost = "messages were lost:\n  rank 1: send(f32[2], dst=0, tag=0) was never received; sent at "
    assert str(done.failure).startswith(lost)
    assert f"{__file__}:" in str(done.failure)


@pytest.mark.platforms("torch")
def test_a_rank_that_never_comes_is_ended_and_shown(monkeypatch):
    """After a failure, a rank that calls no further collective is ended, and its stack is shown; the others unwind."""
    monkeypatch.setattr(launched_processes, "_GRACE_SECONDS", 0.5)
    limits, wait = [], launched_processes.wait

    def noted_wait(lines, seconds):
        limits.append(seconds)
        return wait(lines, seconds)

    monkeypatch.setattr(launched_processes, "wait", noted_wait)

    def body():
        if active_transport().rank == 0:
            raise ArithmeticError("rank 0 has had enough")
        while True:
            time.sleep(0.01)

    done = run_launched(pack((body, ()), body), 2, "torch", 240.0)
    text = str(done.failure)
    assert limits[-1] <= 0.5  # not the 240 s of the world
    assert text.index("rank 0 has had enough") < text.index("was ended in")
    assert "in body" in text


def _chain():
    """Sum over groups that overlap; their members build each group when they need it."""
    t = active_transport()
    results = []
    for members in ((0, 1), (1, 2), (0, 2), (0, 1, 2), (1, 2)):
        if t.rank in members:
            import torch

            results.append(int(t.all_reduce(torch.tensor([10**t.rank]), "sum", members)))
    return results


@pytest.mark.platforms("torch")
def test_groups_that_overlap_are_built_in_any_number():
    """Members that have built different numbers of groups before still meet in the next one."""
    assert run(_chain, "torch", 3).results == [[11, 101, 111], [11, 110, 111, 110], [110, 101, 111, 110]]

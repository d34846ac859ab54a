"""Worlds of real processes: few launches, because each is slow."""

import contextlib
import os
import re
import signal
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.processes import ENGINE_VARIABLE
from hyper_parallel.transport.real import launched_processes
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate
from workshop.conformance.transport import check_transport

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.slow]


def test_gloo_equals_the_simulation_bit_for_bit():
    """Real gloo passes the conformance suite with exactly the bits of the simulated transport."""
    real = launch(check_transport, 3, "torch", ("torch",))
    simulated = simulate(check_transport, 3, "torch", ("torch",))
    for ours, theirs in zip(real, simulated, strict=True):
        assert [x.tobytes() for x in ours] == [x.tobytes() for x in theirs]


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_mindspore_rehearses_over_gloo():
    """MindSpore's CPU rehearsal passes the conformance suite over real processes."""
    assert min(len(results) for results in launch(check_transport, 2, "mindspore", ("mindspore",)))


def alive(pid):
    """Return whether the process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def failure(body, folder, timeout=240.0):
    """Return the error of a launched world of two, after making sure that no process is left."""
    with pytest.raises(RankFailedError) as caught:
        launch(body, 2, "torch", (str(folder),), timeout=timeout)
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return caught.value


def begin(folder):
    """Record this rank's process id, and return its transport."""
    with open(f"{folder}/{os.getpid()}", "w", encoding="ascii"):  # noqa: PTH123
        return active_transport()


@pytest.mark.fault
def test_an_exception_is_reported_and_every_rank_ends(tmp_path):
    """The rank that raised is reported with its traceback; the rank that lost its peer is not."""

    def body(folder):
        t = begin(folder)
        t.barrier((0, 1))
        if t.rank == 1:
            raise LookupError("own")
        t.barrier((0, 1))

    error = failure(body, tmp_path)
    assert list(error.failures) == [1]
    assert isinstance(error.__cause__, LookupError)
    assert 'raise LookupError("own")' in str(error)


@pytest.mark.fault
def test_a_killed_rank_is_reported(tmp_path, monkeypatch):
    """A rank that dies without a report is named."""
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)  # it leaves no coverage, on purpose

    def body(folder):
        t = begin(folder)
        t.barrier((0, 1))
        if t.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        t.barrier((0, 1))

    error = failure(body, tmp_path)
    assert list(error.failures) == [0]
    assert "rank 0 died of SIGKILL without a report" in str(error)
    # It may come to the barrier before or after rank 0 has died, or on a busy machine never.
    waited = "--- rank 1: waited in barrier() (collective 1 of ranks (0, 1)) for ranks [0] at "
    late = "--- rank 1: reached barrier() at "
    assert any(text in str(error) for text in (waited, late, "--- rank 1: was ended in"))


@pytest.mark.fault
def test_a_timeout_shows_stacks_and_every_rank_ends(tmp_path, monkeypatch):
    """A world beyond its time names the rank that hangs, with its stack, and is ended."""
    coordinators = []

    def coordinator(world_size):
        coordinators.append(Coordinator(world_size))
        return coordinators[0]

    def now():
        waits = coordinators and "collective 1" in coordinators[0].describe(1)
        return time.monotonic() + (1000.0 if waits else 0.0)

    monkeypatch.setattr(launched_processes, "Coordinator", coordinator)
    monkeypatch.setattr(launched_processes, "time", SimpleNamespace(monotonic=now))

    def body(folder):
        t = begin(folder)
        t.barrier((0, 1))
        if t.rank == 0:
            time.sleep(600)
        t.barrier((0, 1))

    error = failure(body, tmp_path, timeout=900)
    assert str(error).splitlines()[:2] == ["rank 0 of 2 did not finish within 900 s", "--- rank 0: was running in"]
    assert str(error).count("in body") == 1
    assert "--- rank 1: waited in barrier() (collective 1 of ranks (0, 1)) for ranks [0] at " in str(error)


def _own_collectives(folder, mistake):
    """Call `torch.distributed` itself, and make a mistake in the second collective on rank 1."""
    import torch
    import torch.distributed as dist

    begin(folder)
    dist.all_reduce(torch.ones(3))
    odd = dist.get_rank() == 1
    if mistake == "reduction":
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif mistake == "nobody waits":
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, async_op=True)
        dist.barrier()
    elif not odd:
        dist.barrier()


@pytest.mark.parametrize(
    "mistake, message",
    [
        ("reduction", "ranks 0 and 1 disagree about the reduction of collective 1 of ranks (0, 1):"),
        ("nobody waits", "ranks 0 and 1 disagree about the reduction of collective 1 of ranks (0, 1):"),
        ("absence", "rank 1 returned without joining collective 1 of ranks (0, 1), in which others wait:"),
    ],
)
def test_torch_distributeds_own_collectives_are_compared(tmp_path, mistake, message):
    """A program's own calls that differ, or that a rank leaves out, are an error with both call sites."""
    error = failure(partial(_own_collectives, mistake=mistake), tmp_path)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert str(error.__cause__).startswith(message)
    assert f"{__file__}:" in str(error.__cause__)


LOST = "messages were lost:\n  rank 0: send(f32[2], dst=1, tag=0) was never received; sent at "
UNRECEIVED = "rank 1 returned without receiving what rank 0 sends:\n  rank 0: send(f32[2], dst=1, tag=0) at "


@pytest.mark.fault
@pytest.mark.parametrize("waits, messages", [(True, (UNRECEIVED, LOST)), (False, (LOST,))])
def test_lost_messages_are_reported(waits, messages):
    """A message that nobody receives fails the world, whether its sender has returned or still waits.

    A sender that waits is told by the coordinator, or by gloo, whichever notices first that the receiver has gone.
    """
    with pytest.raises(RankFailedError) as caught:
        launch(_lost_message, 2, "torch", args=(waits,))
    assert any(f"{message}{__file__}:" in str(caught.value) for message in messages)


def _lost_message(waits):
    import torch

    if active_transport().rank == 0:
        work = active_transport().start("send", torch.ones(2), 1)
        if waits:
            work.wait()


def test_world_size_and_platform_must_exist():
    """A world without ranks and a platform that does not exist are refused before anything starts."""
    with pytest.raises(ValueError, match="at least one rank"):
        launch(int, 0)
    with pytest.raises(ValueError, match="'torch' or 'mindspore'"):
        launch(int, 1, "jax")


def test_a_rank_that_cannot_join_reports_why(monkeypatch):
    """An error that keeps ranks from joining the world is reported like an error of their function."""
    monkeypatch.setenv(ENGINE_VARIABLE, "abacus")
    with pytest.raises(RankFailedError) as caught:
        launch(active_transport, 2, "torch")
    assert str(caught.value).startswith("rank")
    assert "abacus" in str(caught.value.__cause__)


@pytest.mark.fault
def test_a_dead_rank_is_noticed_though_its_child_lives(monkeypatch, tmp_path):
    """A process that a rank has forked keeps the rank's connections open; its death is reported all the same."""
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)  # the ranks leave no coverage, on purpose

    def body(folder):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        if begin(folder).rank == 0:
            print("last line", file=sys.stderr, flush=True)  # noqa: T201 - what is tested
            os._exit(3)
        active_transport().barrier((0, 1))

    error = failure(body, tmp_path)
    assert str(error.failures[0]) == "rank 0 died with exit code 3 without a report\nlast line"


def test_a_rank_that_has_returned_leaves_when_all_have_joined(tmp_path):
    """Before, it would break the connections of ranks that still join; afterwards, who waits for it must not hang."""

    def body(folder):
        rank = begin(folder).rank
        own = folder / "first"
        if rank == 0:
            own.with_suffix(".part").write_text(str(os.getpid()))
            own.with_suffix(".part").rename(own)
            return True
        while not own.exists():
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(int(own.read_text()), 0)
                time.sleep(0.01)
        return True

    assert launch(body, 3, "torch", (tmp_path,)) == [True] * 3


def _environment(folder):
    """This rank's variables of torchrun, whether it may start processes, and its part of what all ranks print."""
    import random

    import numpy as np
    import torch

    batches = [batch.tolist() for batch in torch.utils.data.DataLoader(torch.arange(3), batch_size=2, num_workers=1)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "OWN")
    os.write(1, f"printed {os.environ['RANK']}\n".encode())
    drawn = (random.getrandbits(64), float(np.random.rand()))  # noqa: NPY002 - the global state
    return [os.environ.get(name) for name in names], batches, drawn, int(os.environ["MASTER_PORT"]), folder


def test_ranks_are_as_torchrun_starts_them(tmp_path, monkeypatch, capfd):
    """They have torchrun's variables and the launcher's, start processes, print, and draw different numbers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for own in ("first", "second"):
        monkeypatch.setenv("OWN", own)
        first, second = launch(_environment, 2, "torch", (str(tmp_path),))
        for rank, result in enumerate((first, second)):
            assert result[0] == [str(rank), str(rank), "2", "2", "127.0.0.1", "1", own]
            assert result[1] == [[0, 1], [2]]
        assert first[2] != second[2]
        assert first[3] == second[3]
        assert sorted(re.findall(r"printed \d", capfd.readouterr().out)) == ["printed 0", "printed 1"]
    monkeypatch.delenv("OWN")
    assert launch(_environment, 1, "torch", (str(tmp_path),))[0][0][-1] is None


@pytest.mark.platforms("torch")
def test_a_world_whose_later_rank_cannot_start_ends_at_once(monkeypatch):
    """The ranks that have started are ended, where they would wait for the others until their limit."""
    from hyper_parallel.transport.simulated import rank_pool

    started, start = [], rank_pool.start_process

    def start_one(*args, **options):
        if started:
            raise OSError("no more processes")
        started.append(start(*args, **options))
        return started[0]

    monkeypatch.setattr(rank_pool, "start_process", start_one)
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)
    with pytest.raises(OSError, match=r"^no more processes$"):
        launch(active_transport, 3, "torch", timeout=600)
    assert started[0].exitcode is not None

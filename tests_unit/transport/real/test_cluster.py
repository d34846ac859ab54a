"""MindSpore's cluster: the variables of msrun, the scheduler, and ranks that meet in it on CPU."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.real import cluster
from hyper_parallel.transport.real.cluster import (
    RankStart,
    meets_in_cluster,
    rank_environment,
    scheduler_environment,
    serve_scheduler,
)
from hyper_parallel.transport.real.launched_processes import close_launched_teams, run_launched
from hyper_parallel.transport.serialization import pack


@pytest.mark.parametrize("world_size, rank", [(2, 1), (8, 0), (8, 7)])
def test_a_rank_has_the_variables_of_a_worker_of_msrun(world_size, rank):
    """One machine, one scheduler on loopback, and rank, node and device of one number, as `msrun --worker_num` sets."""
    assert rank_environment(rank, world_size, "8118") == {
        "MS_WORKER_NUM": str(world_size), "RANK_SIZE": str(world_size), "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": "8118", "MS_TOPO_TIMEOUT": "300", "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank),
        "RANK_ID": str(rank), "DEVICE_ID": str(rank),
    }  # fmt: skip


def test_the_scheduler_has_the_variables_of_msruns():
    """The scheduler is rank 0 of its role, and has neither a node's number nor a device."""
    assert scheduler_environment(8, "8118") == {
        "MS_WORKER_NUM": "8", "RANK_SIZE": "8", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118",
        "MS_TOPO_TIMEOUT": "300", "MS_ROLE": "MS_SCHED", "RANK_ID": "0",
    }  # fmt: skip


def test_only_ranks_of_mindspore_on_devices_meet_in_a_cluster():
    """PyTorch's ranks meet by PyTorch's store, and MindSpore's on CPU over gloo: they have no scheduler to end."""
    assert meets_in_cluster("mindspore", "npu")
    assert not meets_in_cluster("mindspore", "cpu")
    assert not meets_in_cluster("torch", "npu")
    start = RankStart("torch", "npu", 2)
    assert (start.server, start.port, start.how_it_ended()) == ("torch", "", "")
    start.close()


def test_the_scheduler_listens_in_mindspores_own_start(monkeypatch):
    """It calls MindSpore's `init` with its variables set, and a signal ends it although it never runs Python again."""
    called, handlers = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(os, "environ", {})
    init = SimpleNamespace(init=lambda: called.append(dict(os.environ)))
    monkeypatch.setitem(sys.modules, cluster._DEVICES, SimpleNamespace(communication=init))
    try:
        serve_scheduler(2, "8118")
        assert [signal.getsignal(number) for number in handlers] == [signal.SIG_IGN, signal.SIG_DFL]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert called == [scheduler_environment(2, "8118")]


def _met():
    """Return what MindSpore's own cluster tells of this rank, and a sum over HCCL's rehearsal."""
    import mindspore
    import mindspore.communication as comm

    from hyper_parallel.transport.base import active_transport

    transport = active_transport()
    total = transport.all_reduce(mindspore.Tensor([1.0 + transport.rank, 2.0]), "sum", (0, 1))
    return transport.backend, comm.get_rank(), comm.get_group_size(), os.environ["MS_ROLE"], total.tolist()


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_ranks_meet_in_mindspores_cluster(monkeypatch):
    """Started as on devices, with a scheduler beside them, two ranks on CPU meet; all end with their world."""
    close_launched_teams()
    monkeypatch.setattr(cluster, "meets_in_cluster", lambda *_: True)
    monkeypatch.setattr(cluster, "FRESH", "rehearsal")  # fresh interpreters take seconds to import the frameworks
    started = []
    monkeypatch.setattr(cluster, "start_process", _kept(started))
    done = run_launched(pack((_met, ()), _met), 2, "mindspore", 240.0)
    assert done.failure is None, str(done.failure)
    assert done.results == [("hccl", rank, 2, "MS_WORKER", [3.0, 4.0]) for rank in (0, 1)]
    (scheduler,) = started
    assert scheduler.is_alive()
    close_launched_teams()
    assert scheduler.exitcode == -signal.SIGKILL


def _kept(started):
    """``start_process`` that keeps what it started."""
    start = cluster.start_process

    def start_one(*args):
        started.append(start(*args))
        return started[-1]

    return start_one


@pytest.mark.platforms("torch")
def test_a_scheduler_that_ended_is_named(monkeypatch):
    """The error of a world that nobody could join says that its scheduler has ended, and how."""
    monkeypatch.setattr(cluster, "meets_in_cluster", lambda *_: True)
    scheduler = SimpleNamespace(exitcode=1, kill=lambda: None, join=lambda: None)
    monkeypatch.setattr(cluster, "start_process", lambda *_: scheduler)
    monkeypatch.setattr(cluster, "FRESH", "torch")
    with pytest.raises(RankFailedError, match=r"MindSpore's scheduler ended with exit code 1; stderr has its error"):
        run_launched(pack((os.getpid, ())), 1, "torch", 10.0, "npu")

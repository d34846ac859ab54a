"""Simulated ranks of PyTorch that are processes: a thread of the parent calls the coordinator for each of them.

A rank's process computes while its thread in the parent holds the baton (one thread at a time does), so order, checks
and results are the same as with ranks that are threads. But all globals of a process belong to its rank.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.frontends.c10d import forked_rank
from hyper_parallel.transport.frontends.c10d.forked_rank import ForkedTask
from hyper_parallel.transport.frontends.c10d.shared_payloads import Packed, SharedFiles
from hyper_parallel.transport.frontends.c10d.simulated_store import SimulatedStore
from hyper_parallel.transport.host.torch.ops import TorchOps
from hyper_parallel.transport.measurement import current_measurement
from hyper_parallel.transport.owned_folders import owned_folder
from hyper_parallel.transport.processes import SharedFile, search_path
from hyper_parallel.transport.serialization import pack, unpack
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError, Resumption
from hyper_parallel.transport.simulated.message_board import Posted
from hyper_parallel.transport.simulated.rank_pool import Worker, asks_for_rank, stacks_of, warm_server
from hyper_parallel.transport.simulated.rank_process import RankReport, RankTask
from hyper_parallel.transport.simulated.threads import ThreadEndpoint, run_threads
from hyper_parallel.transport.simulated.transport import SimulatedTransport

__all__ = ["run_forked"]

_STEP_SECONDS = 0.2
_LATE = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel",
)
"""Modules that PyTorch imports when it first needs them, such as ``_dynamo`` for an optimizer."""

_MEMORY = "/dev/shm"  # noqa: S108 - files in it are memory


class _NoState:
    """:class:`HostOps` of ranks that are processes, which share no state that must be saved or restored."""

    framework = "torch"

    def save_state(self) -> None:
        """Do nothing."""

    def restore_state(self, state: Any, now: Any = None) -> None:
        """Do nothing."""


def run_forked(
    fn: Callable[..., Any], args: Sequence[Any], world_size: int, timeout: float, packages: Sequence[str] = ()
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` ranks, which are processes of this run only; return results in rank order.

    Args:
        fn: function that every rank runs; pickled by value unless its module is installed.
        args: arguments of ``fn``, picklable.
        world_size: number of ranks, at least one.
        timeout: seconds after which the run is aborted and its processes are ended.
        packages: packages that the fork server of the ranks imports before it forks them.

    Raises:
        WorldFailedError: a rank raised, died, never finished, or left messages undelivered.
    """
    where = Path(_MEMORY) if os.access(_MEMORY, os.W_OK) else None
    with owned_folder("hyper_parallel_shared_", where) as folder:
        world = _ForkedWorld(_tasks(fn, args, world_size, str(folder)))
        try:
            world.start([*_LATE, *packages])
            return run_threads(world.rank, world_size, cast("Any", _NoState()), timeout, world)
        finally:
            world.end()


def _tasks(fn: Callable[..., Any], args: Sequence[Any], world_size: int, folder: str) -> list[ForkedTask]:
    body = pack((fn, tuple(args)), fn)
    traced, measurement = sys.gettrace() is not None, current_measurement()
    here = str(Path.cwd())
    state, threads = TorchOps().save_state(), torch.get_num_threads()
    return [
        ForkedTask(
            RankTask(rank, world_size, body, None, search_path(), here, traced, measurement), state, threads, folder
        )
        for rank in range(world_size)
    ]


class _ForkedWorld:
    """The processes of one run, and the state that their threads in this process share.

    Attributes:
        traces: per rank the traceback of its error.
    """

    def __init__(self, tasks: list[ForkedTask]) -> None:
        self.traces: dict[int, str] = {}
        self._tasks = tasks
        self._workers: list[Worker] = []
        self._ended: set[int] = set()
        self._files = SharedFiles()
        self._sites = threading.local()
        self._store = SimulatedStore(
            lambda: cast("SimulatedTransport | None", active_transport()), lambda: self._sites.site
        )

    def start(self, packages: Sequence[str]) -> None:
        """Start the processes; packages that read their rank during import are imported by the ranks instead."""
        asking: Mapping[str, Sequence[str]] | None = None
        while asking is None or asking:
            self._fork(warm_server("torch", packages), 1)
            _, asking = self._receive(0, self._workers[0])
            if asking:
                asks_for_rank(asking)
                self._workers.pop().close(idle=True)
        self._fork(warm_server("torch", packages), len(self._tasks) - len(self._workers))

    def _fork(self, server: str, count: int) -> None:
        for _ in range(count):
            self._workers.append(Worker(forked_rank.serve, (SharedFile(2), os.getpid()), server, daemon=False))

    def end(self) -> None:
        """End the processes; those that have reported exit by themselves."""
        for worker in self._workers:
            worker.line.close()
        for rank, worker in enumerate(self._workers):
            worker.close(idle=rank in self._ended)

    def stacks(self) -> dict[int, str]:
        """The stack of each running rank."""
        return stacks_of({rank: worker for rank, worker in enumerate(self._workers) if rank not in self._ended})

    def rank(self) -> Any:
        """Serve the requests of the process of this thread's rank; return its result."""
        transport = cast("SimulatedTransport", active_transport())
        rank, worker = transport.rank, self._workers[transport.rank]
        caller = _Caller(cast("ThreadEndpoint", transport.endpoint), self._store, self._files, self._sites)
        self._send(rank, worker, self._tasks[rank])
        while True:
            kind, content = self._receive(rank, worker)
            caller.mapped()
            if kind == "ready":
                continue
            if kind == "print":
                getattr(sys, content[0]).write(content[1])
            elif kind == "report":
                self._ended.add(rank)
                return self._result(rank, content)
            else:
                self._send(rank, worker, caller.call(kind, content))

    def _result(self, rank: int, report: RankReport) -> Any:
        if report.how == "returned":
            return unpack(report.packed)
        if report.how == "unwound":
            raise RankAbortedError
        self.traces[rank] = report.trace
        raise unpack(report.packed)

    def _send(self, rank: int, worker: Worker, content: Any) -> None:
        try:
            worker.line.send(content)
        except OSError as error:
            raise self._death(rank, worker, error) from None

    def _receive(self, rank: int, worker: Worker) -> tuple[str, Any]:
        try:
            while not worker.line.poll(_STEP_SECONDS):  # the thread of an aborted run is interrupted here
                pass
            message: tuple[str, Any] = worker.line.recv()
        except (EOFError, OSError) as error:
            raise self._death(rank, worker, error) from None
        return message

    def _death(self, rank: int, worker: Worker, error: Exception) -> RankFailedError:
        text = f"rank {rank} {worker.how_it_died(error)}"
        self.traces[rank] = "\n".join(filter(None, [text, worker.last_words()]))
        return RankFailedError(text)


class _Caller:
    """Executes the requests of one rank's process on the endpoint of its thread.

    Args:
        endpoint: endpoint of the thread.
        store: key-value store of the world.
        files: files that hold the payloads.
        sites: the call site, in the program, of the current call.
    """

    def __init__(
        self, endpoint: ThreadEndpoint, store: SimulatedStore, files: SharedFiles, sites: threading.local
    ) -> None:
        self._endpoint, self._values, self._files, self._sites = endpoint, store, files, sites
        self._posted: list[Posted] = []
        self._delivered: Sequence[Any] = ()

    def call(self, kind: str, content: Any) -> Resumption:
        """Return the result of the call, or its error."""
        try:
            return Resumption(getattr(self, f"_{kind}")(content))
        except (Exception, RankAbortedError) as error:  # noqa: BLE001 - of the rank that calls
            return Resumption(error=error.with_traceback(None))

    def mapped(self) -> None:
        """Record that the rank continues: it has mapped the payloads that it received."""
        self._files.mapped(self._delivered)
        self._delivered = ()

    def _deliver(self, parts: list[Packed]) -> list[Packed]:
        self._delivered = parts
        return parts

    def _exchange(self, contribution: Contribution) -> list[Packed]:
        self._files.sent(contribution.payloads)
        return self._deliver(self._endpoint.exchange(contribution))

    def _start(self, contribution: Contribution) -> None:
        self._files.sent(contribution.payloads)
        self._endpoint.start(contribution)

    def _wait(self, ticket: int) -> list[Packed]:
        return self._deliver(self._endpoint.wait(ticket))

    def _ready(self, ticket: int) -> bool:
        return self._endpoint.ready(ticket)

    def _send(self, content: Any) -> None:
        message, payload = content
        self._files.sent([payload])
        self._endpoint.send(message, payload)

    def _receive(self, posted: Any) -> Packed:
        return self._deliver([self._endpoint.receive(posted)])[0]

    def _post(self, content: Any) -> int:
        message, payload, sending = content
        if sending:
            self._files.sent([payload])
        self._posted.append(self._endpoint.post(message, payload, sending=sending))
        return len(self._posted) - 1

    def _is_matched(self, number: int) -> bool:
        return self._posted[number].matched

    def _matched(self, number: int) -> tuple[Packed | None, Any]:
        posted = self._posted[number]
        payload = self._endpoint.matched(posted)
        return (None, posted.message) if posted.sending else (self._deliver([payload])[0], posted.message)

    def _give_way(self, nothing: None) -> None:
        del nothing
        self._endpoint.give_way()

    def _store(self, content: Any) -> Any:
        name, args, self._sites.site = content
        return getattr(self._values, name)(*args)

"""The process of a real rank: it joins a world and runs one task, or, if it is warm, a series of tasks."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import numpy as np

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.base import Transport
from hyper_parallel.transport.checks.flight_recorder import RankFlight, RecordedLine
from hyper_parallel.transport.failures import NEEDS_GLOO
from hyper_parallel.transport.frames import trace
from hyper_parallel.transport.processes import SharedFile
from hyper_parallel.transport.real.guarded import GuardedTransport
from hyper_parallel.transport.serialization import pack_error
from hyper_parallel.transport.simulated.endpoint import PostingEndpoint
from hyper_parallel.transport.simulated.rank_process import (
    PipeEndpoint,
    RankReport,
    RankTask,
    end_by_sigterm,
    leave_after,
    next_task,
    run_rank,
    seed_generators,
)

__all__ = ["RankSetup", "guarded", "launched_main", "real_world", "single_run_main"]

_TORCH_CHECKS = "hyper_parallel.transport.checks.torch_distributed"
_TORCH_MESSAGES = "hyper_parallel.transport.frontends.c10d.checked_messages"
_HOME = {
    "torch": "hyper_parallel.transport.real.c10d",
    "mindspore": "hyper_parallel.transport.real.mindspore.transport",
}
_DEVICES_OF_MINDSPORE = "hyper_parallel.transport.real.mindspore.devices"


@dataclass(frozen=True)
class RankSetup:
    """How a rank joins its world.

    Attributes:
        framework: framework of the tensors.
        device: ``cpu``, ``cuda`` or ``npu``.
        rank, world_size: number of the rank, and number of ranks.
        store: file for the rendezvous.
        output: file that receives the rank's output; in a single run only its stderr.
        launcher: process id of the parent; the rank ends when that process has ended.
        engine: communication library, such as ``hccl``, whose limits are checked while gloo communicates; or empty.
        port: port of the scheduler of MindSpore's cluster; empty without a scheduler.
    """

    framework: str
    device: str
    rank: int
    world_size: int
    store: str
    output: str
    launcher: int
    engine: str = ""
    port: str = ""


def launched_main(line: Connection, stack_path: str, setup: RankSetup) -> None:
    """Serve tasks until the parent closes the connection; never returns."""
    leave = os._exit
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _stack_file(stack_path) as stack:
        os._exit = _traced_exit(stack)
        output = os.open(setup.output, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        flight = _flight(setup, leave)
        leave_after(lambda: _serve_all(line, setup, flight, stack, output), stack, leave)


def single_run_main(line: Connection, stack_path: str, setup: RankSetup, output: SharedFile) -> None:
    """Run one task like a rank of torchrun, report, and exit; never returns.

    Args:
        line: connection to the parent.
        stack_path: file that receives the stack on SIGUSR1.
        setup: settings for joining the world.
        output: receives the rank's stdout.
    """
    multiprocessing.set_start_method(None, force=True)  # the server's method would import the program again
    os.setsid()  # only the launcher gets a Ctrl-C of the terminal; it ends its ranks
    with _stack_file(stack_path) as stack:
        os.dup2(output.number, 1)
        os.dup2(os.open(setup.output, os.O_WRONLY | os.O_APPEND), 2)
        flight = _flight(setup, os._exit)
        leave_after(lambda: _serve_one(line, setup, flight), stack, os._exit)


@contextmanager
def _stack_file(path: str) -> Iterator[IO[str]]:
    """Return a file that receives this process's stack on SIGUSR1 and on crashes; let SIGTERM end the process."""
    end_by_sigterm()
    with Path(path).open("w", encoding="utf-8") as stack:
        faulthandler.enable(file=stack, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        yield stack


def _flight(setup: RankSetup, leave: Callable[[int], None]) -> RankFlight:
    flight = RankFlight(setup.rank, setup.world_size, setup.launcher)
    threading.Thread(target=flight.leave_with_parent, args=(leave,), daemon=True).start()
    return flight


def _serve_one(line: Connection, setup: RankSetup, flight: RankFlight) -> None:
    task, environment = next_task(line)
    os.environ.clear()  # removes the variables of the fork server
    os.environ.update(environment)
    rank = _Rank(setup, PipeEndpoint(RecordedLine(line, flight)))
    line.send(("joined", None))
    report = rank.report or rank.serve(task, environment, flight, warm=False)
    sys.stdout.flush()
    sys.stderr.flush()
    line.send(("done", report))
    next_task(line)  # waits until all ranks have joined and the line closes: exiting earlier breaks their connections


def _serve_all(line: Connection, setup: RankSetup, flight: RankFlight, stack: IO[str], output: int) -> None:
    rank = _Rank(setup, PipeEndpoint(RecordedLine(line, flight)))
    line.send(("ready", rank.report))
    while True:
        task, environment = next_task(line)
        for file in (stack.fileno(), output):
            os.ftruncate(file, 0)
        os.lseek(stack.fileno(), 0, os.SEEK_SET)
        report = rank.serve(task, environment, flight)
        flight.recorder = None
        sys.stdout.flush()
        sys.stderr.flush()
        line.send(("done", report))


class _Rank:
    """A rank that joins its world; ``report`` is the error if it could not join, or None."""

    def __init__(self, setup: RankSetup, endpoint: PostingEndpoint) -> None:
        self.report: RankReport | None = None
        self._framework, self._environment = setup.framework, set[str]()
        try:
            self._home: Any = importlib.import_module(_HOME[setup.framework])
            self._transport = guarded(real_world(setup), setup.framework, endpoint)
        except Exception as error:  # noqa: BLE001 - goes into the report
            self.report = RankReport("raised", pack_error(error), trace(error))

    def serve(
        self, task: RankTask, environment: Mapping[str, str], flight: RankFlight, *, warm: bool = True
    ) -> RankReport:
        """Run one task with the parent's search path, folder and environment; ``warm`` ranks draw the same numbers."""
        for name in self._environment - set(environment):
            os.environ.pop(name, None)
        os.environ.update(environment)
        self._environment = set(environment)
        flight.begin()
        sys.path[:] = task.path
        os.chdir(task.folder)
        if warm or self._framework == "mindspore":
            self._home.seed_rank()
        if warm:
            seed_generators()
        else:  # ranks are forked with equal random states, unlike processes that torchrun starts
            random.seed()
            np.random.seed()  # noqa: NPY002 - the global state that rank code may sample from
        return run_rank(task, self._transport)


def real_world(setup: RankSetup) -> Transport:
    """Join a rank's world without a coordinator; return a transport of PyTorch tensors, or of MindSpore's over HCCL.

    Raises:
        UnsupportedOnBackend: there is no such device, or PyTorch is missing for MindSpore ranks on CPU.
    """
    try:
        if setup.framework == "mindspore" and (setup.port or setup.engine == "hccl"):
            devices: Any = importlib.import_module(_DEVICES_OF_MINDSPORE)
            over_hccl: Transport = devices.start_world(
                setup.device, setup.rank, setup.world_size, setup.port, setup.store
            )
            return over_hccl
        c10d: Any = importlib.import_module(_HOME["torch"])  # gloo comes with PyTorch, for both frameworks
    except ImportError as error:
        raise UnsupportedOnBackend(NEEDS_GLOO) from error
    over_torch: Transport = c10d.start_world(
        setup.device, setup.rank, setup.world_size, f"file://{setup.store}", setup.engine
    )
    return over_torch


def guarded(real: Transport, framework: str, endpoint: PostingEndpoint) -> Transport:
    """Return the transport of a real rank whose collectives a coordinator compares first.

    Collectives that the program calls on ``torch.distributed`` itself are compared too, from now on in this process.

    Args:
        real: result of :func:`real_world`.
        framework: framework of the rank's tensors.
        endpoint: connection to the coordinator.
    """
    if real.framework == "mindspore":
        return GuardedTransport(real, importlib.import_module(_DEVICES_OF_MINDSPORE).TensorFacts(), endpoint)
    c10d: Any = importlib.import_module(_HOME["torch"])
    checked = GuardedTransport(real, c10d.TorchOps(), endpoint)
    if framework == "torch":
        importlib.import_module(_TORCH_CHECKS).guard_functions(checked.agree)
        importlib.import_module(_TORCH_MESSAGES).guard_messages(checked)
        return checked
    bridged: Transport = importlib.import_module(_HOME["mindspore"]).rehearse_over(checked)
    return bridged


def _traced_exit(stack: IO[str]) -> Any:
    """Return an ``os._exit`` that writes its call stack first: a rank that exits this way sends no report."""
    leave = os._exit

    def exit_with_stack(status: int) -> None:
        faulthandler.dump_traceback(file=stack, all_threads=False)
        leave(status)

    return exit_with_stack

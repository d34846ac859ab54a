"""What a warm rank of a real world does: join it once, then serve task after task in it."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

import numpy as np

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.base import Transport
from hyper_parallel.transport.checks.guarded import GuardedTransport
from hyper_parallel.transport.coordinator import Endpoint
from hyper_parallel.transport.failures import NEEDS_GLOO, trace
from hyper_parallel.transport.rank_process import (
    PipeEndpoint,
    RankReport,
    RankTask,
    end_by_sigterm,
    leave_after,
    next_task,
    run_rank,
)
from hyper_parallel.transport.serialization import pack_error

__all__ = ["RankSetup", "launched_main"]

_FOLLOW_SECONDS = 1.0
_TORCH_CHECKS = "hyper_parallel.transport.checks.torch_distributed"
_HOME = {"torch": "hyper_parallel.transport.c10d", "mindspore": "hyper_parallel.transport.mindspore"}


@dataclass(frozen=True)
class RankSetup:
    """A rank's place in its world.

    Attributes:
        framework: whose tensors it carries.
        device: ``cpu``, ``cuda`` or ``npu``.
        rank, world_size: who it is.
        store: file through which the ranks meet.
        output: file that receives what the rank prints.
        launcher: process without which the rank ends.
    """

    framework: str
    device: str
    rank: int
    world_size: int
    store: str
    output: str
    launcher: int


def launched_main(line: Connection, stack_path: str, seat: RankSetup) -> None:
    """Serve tasks until the parent closes the line; never returns."""
    leave = os._exit
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_by_sigterm()
    with open(stack_path, "w", encoding="utf-8") as stack:  # noqa: PTH123
        faulthandler.enable(file=stack, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        os._exit = _telling_exit(stack)
        output = os.open(seat.output, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        threading.Thread(target=_follow, args=(seat.launcher, leave), daemon=True).start()
        leave_after(lambda: _serve_all(line, seat, stack, output), stack, leave)


def _serve_all(line: Connection, seat: RankSetup, stack: IO[str], output: int) -> None:
    rank = _Rank(seat, PipeEndpoint(line))
    line.send(("ready", rank.report))
    while True:
        task = next_task(line)
        for file in (stack.fileno(), output):
            os.ftruncate(file, 0)
        os.lseek(stack.fileno(), 0, os.SEEK_SET)
        report = rank.serve(*task)
        sys.stdout.flush()
        sys.stderr.flush()
        line.send(("done", report))


class _Rank:
    """One rank of the world that it joins; ``report`` says why it could not, or is None."""

    def __init__(self, seat: RankSetup, endpoint: Endpoint) -> None:
        self.report: RankReport | None = None
        self._environment: set[str] = set()
        try:
            self._home: Any = importlib.import_module(_HOME[seat.framework])
            self._transport = _join(seat, endpoint)
        except Exception as error:  # noqa: BLE001 - goes into the report
            self.report = RankReport("raised", pack_error(error), trace(error))

    def serve(self, task: RankTask, environment: Mapping[str, str]) -> RankReport:
        """Run one task with the parent's search path, folder and environment."""
        for name in self._environment - set(environment):
            os.environ.pop(name, None)
        os.environ.update(environment)
        self._environment = set(environment)
        sys.path[:] = task.path
        os.chdir(task.folder)
        self._home.seed_rank()
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global state that rank code may draw from
        return run_rank(task, self._transport)


def _join(seat: RankSetup, endpoint: Endpoint) -> Transport:
    """Join the real world; every collective is agreed upon with the parent first."""
    if seat.framework != "torch" and seat.device != "cpu":
        msg = f"warm ranks of MindSpore run on cpu; on {seat.device} its ranks are started by msrun"
        raise UnsupportedOnBackend(msg)
    try:
        c10d: Any = importlib.import_module(_HOME["torch"])  # gloo comes with PyTorch, for both frameworks
    except ImportError as error:
        raise UnsupportedOnBackend(NEEDS_GLOO) from error
    real = c10d.start_world(seat.device, seat.rank, seat.world_size, f"file://{seat.store}")
    guarded = GuardedTransport(real, c10d.TorchOps(), endpoint)
    if seat.framework == "torch":
        importlib.import_module(_TORCH_CHECKS).guard_functions(guarded.agree)
        return guarded
    bridged: Transport = importlib.import_module(_HOME["mindspore"]).rehearse_over(guarded)
    return bridged


def _telling_exit(stack: IO[str]) -> Any:
    """``os._exit`` that writes down where it was called: a rank that leaves that way says nothing else."""
    leave = os._exit

    def tell(status: int) -> None:
        faulthandler.dump_traceback(file=stack, all_threads=False)
        leave(status)

    return tell


def _follow(launcher: int, leave: Any) -> None:
    """Leave when the parent has gone, however it went: no rank outlives it."""
    while True:
        time.sleep(_FOLLOW_SECONDS)
        with contextlib.suppress(PermissionError):
            try:
                os.kill(launcher, 0)
            except ProcessLookupError:
                leave(1)

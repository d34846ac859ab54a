"""Main loop of a warm rank process: wait for a task, run it as one rank, report, and wait again."""

from __future__ import annotations

import faulthandler
import importlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import IO, Any

import numpy as np

from hyper_parallel.transport.base import Transport, use_transport
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint
from hyper_parallel.transport.checks.flight_recorder import RecordedLine
from hyper_parallel.transport.frames import trace
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.measurement import Measurement, measured
from hyper_parallel.transport.serialization import pack_back, pack_error, unpack
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError, Resumption, unwinding
from hyper_parallel.transport.simulated.transport import SimulatedTransport

__all__ = [
    "LEAVE_FORKED",
    "PipeEndpoint",
    "RankReport",
    "RankTask",
    "end_by_sigterm",
    "leave_after",
    "next_task",
    "rank_main",
    "resolve",
    "run_rank",
    "seed_generators",
]

_SIGNAL_SECONDS = 1.0

LEAVE_FORKED: list[Callable[[], Any]] = [lambda: os._exit(0)]
"""The last item is called in a process that the program forked and that then returns into this library's code."""


@dataclass
class RankTask:
    """A task of a rank process.

    Attributes:
        rank, world_size: number of the rank, and number of ranks.
        body: packed pair of function and arguments.
        start: ``module:function`` that turns the numpy transport into the framework's, or None to keep numpy.
        path, folder: ``sys.path`` and working directory of the parent.
        traced: whether the parent has a trace function; if not, the rank's tracer is paused.
        measurement: configuration of coverage.py in the parent, or None.
        device: number of the device that all ranks share, the second argument of ``start``; None for the CPU.
        main: file of the parent's ``__main__``, whose classes are pickled by value; ``inspect`` reads their source
            from this file.
    """

    rank: int
    world_size: int
    body: bytes
    start: str | None
    path: list[str]
    folder: str
    traced: bool = True
    measurement: Measurement | None = None
    device: int | None = None
    main: str | None = None


@dataclass
class RankReport:
    """Outcome of a rank: ``returned`` with a packed result, ``raised`` with a packed error and trace, ``unwound``."""

    how: str
    packed: bytes = b""
    trace: str = ""


class PipeEndpoint:
    """The endpoint of a rank process, whose coordinator is in the parent."""

    own_process = True

    def __init__(self, line: Connection | RecordedLine) -> None:
        self._line = line

    def exchange(self, contribution: Contribution) -> list[Any]:
        """See :class:`Endpoint`."""
        result: list[Any] = self._ask(("join", contribution))
        return result

    def start(self, contribution: Contribution) -> None:
        """See :class:`Endpoint`."""
        self._line.send(("start", contribution))

    def wait(self, ticket: int) -> list[Any]:
        """See :class:`Endpoint`."""
        result: list[Any] = self._ask(("await", ticket))
        return result

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """See :class:`Endpoint`."""
        self._line.send(("send", (message, payload)))

    def receive(self, posted: MessageFingerprint) -> Any:
        """See :class:`Endpoint`."""
        return self._ask(("receive", posted))

    def post(
        self, ticket: int, message: MessageFingerprint, payload: Any, *, sending: bool, raises: bool = True
    ) -> None:
        """See :class:`PostingEndpoint`."""
        self._line.send(("post", (ticket, message, payload, sending, raises)))

    def settle(self, ticket: int) -> tuple[int, Any]:
        """See :class:`PostingEndpoint`."""
        result: tuple[int, Any] = self._ask(("settle", ticket))
        return result

    def is_settled(self, ticket: int) -> bool:
        """See :class:`PostingEndpoint`."""
        return bool(self._ask(("probe", ticket)))

    def _ask(self, request: tuple[str, Any]) -> Any:
        self._line.send(request)
        resumption: Resumption = self._line.recv()
        if resumption.error is not None:
            raise resumption.error
        return resumption.value


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def rank_main(line: Connection, stack_path: str) -> None:
    """Serve tasks until the parent closes the connection; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_by_sigterm()
    with Path(stack_path).open("w", encoding="utf-8") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        leave_after(lambda: _serve_all(line), stack_file, os._exit)


def _serve_all(line: Connection) -> None:
    while True:
        line.send(("done", _serve(next_task(line), line)))


def end_by_sigterm() -> None:
    """Make SIGTERM end this process even if another handler raises.

    A process that is forked from a measured server has two chained handlers of coverage.py. The second one raises, so
    the process would exit as failed, or continue if the error is caught. Forked children of this process, such as
    workers of a program's pool, end at once, since coverage.py may have been locked at the fork. They have no Python
    handler, since a new process drops signals that arrive before Python is set up in it.
    """
    handler, own, masks = signal.getsignal(signal.SIGTERM), os.getpid(), threading.local()
    if not callable(handler):
        return

    def end(number: int, frame: FrameType | None) -> None:
        try:
            if os.getpid() == own:
                handler(number, frame)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def block() -> None:
        masks.kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.kept)

    def unblock_child() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock_child)


def next_task(line: Connection) -> Any:
    """Return the next task of the parent.

    Python runs a signal handler between two bytecodes. The handler of a signal that arrives just before the wait
    starts, or in another thread, would run during the next task and end the process there. Therefore the wait wakes up
    periodically.
    """
    while not line.poll(_SIGNAL_SECONDS):
        pass
    return line.recv()


def leave_after(serve: Callable[[], None], stack: IO[str], leave: Callable[[int], None]) -> None:
    """Serve until the parent closes the connection or ``serve`` returns, then exit.

    Args:
        serve: function that serves the parent.
        stack: file that receives the traceback of any other error; the exit status is then 1.
        leave: function that ends the process.
    """
    status = 1
    try:
        serve()
        status = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        status = 0
    except BaseException:  # noqa: BLE001 - report everything to the parent
        traceback.print_exc(file=stack)
        stack.flush()
    finally:
        # SIGTERM must not interrupt an exiting rank, which may be saving its coverage data.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The framework's own exit hooks may wait for threads that a forked process does not have.
        leave(status)


def _serve(task: RankTask, line: Connection) -> RankReport:
    sys.path[:] = task.path
    os.chdir(task.folder)
    if task.main is not None:
        sys.modules["__main__"].__file__ = task.main
    seed_generators()
    transport = SimulatedTransport(task.rank, task.world_size, NumpyOps(), PipeEndpoint(line))
    try:
        return run_rank(task, transport)
    finally:
        transport.end()  # the process may serve another run


def seed_generators() -> None:
    """Reseed Python's and NumPy's global generators, since the process may have served another run."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state that rank code may sample from


def run_rank(task: RankTask, transport: Transport) -> RankReport:
    """Run the task's function with its transport active; return its outcome."""
    if task.traced or task.measurement is not None:
        with measured(task.measurement):
            return _run(task, transport)
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return _run(task, transport)
    finally:
        sys.settrace(tracer)


def _run(task: RankTask, transport: Transport) -> RankReport:
    try:
        if task.start is not None:
            transport = resolve(task.start)(transport, *(() if task.device is None else (task.device,)))
        fn, args = unpack(task.body)
        with use_transport(transport):
            result = fn(*args)
        return RankReport("returned", pack_back(result))
    except RankAbortedError:
        return RankReport("unwound")
    except BaseException as error:  # noqa: BLE001 - SystemExit of a rank is a failure of that rank as well
        if unwinding(error):
            return RankReport("unwound")
        text = trace(error)
        return RankReport("raised", pack_error(error), text)

"""Warm worker processes: started from a fork server that has the framework imported, reused from run to run."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hyper_parallel.transport.atomic_files import atomic_write_text
from hyper_parallel.transport.failures import exit_text, starting
from hyper_parallel.transport.measurement import wrote_data_at
from hyper_parallel.transport.processes import process_state, servers_search_here
from hyper_parallel.transport.simulated.rank_process import rank_main
from hyper_parallel.transport.simulated.warm_packages import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.context import ForkServerProcess

__all__ = [
    "ENVIRONMENT",
    "FRESH",
    "LEDGER_VARIABLE",
    "SERVERS",
    "Worker",
    "asks_for_rank",
    "check_in",
    "check_out",
    "close_workers",
    "end_processes",
    "preload",
    "register_rank",
    "stacks_of",
    "start_process",
    "warm_server",
]

LEDGER_VARIABLE = "HP_RANK_LEDGER"
"""Names a folder in which every started rank leaves a file named after its process number: the coverage gate compares
them with the data files that ranks leave. Unset it for a rank that is to be killed on purpose."""

ENVIRONMENT = {"MS_DEV_LAUNCH_BLOCKING": "1", "GLOG_v": "4"}
"""Variables of ranks that are not set: errors at the operator of MindSpore that fails, and far less waiting on few
cores; a quiet log."""

_MINDSPORE = [
    "mindspore",
    "hyper_parallel.transport.real.mindspore.transport",
    "hyper_parallel.platform.built",
]
_PRELOAD = {
    "mindspore": _MINDSPORE,
    # MindSpore's real processes on CPU borrow gloo from PyTorch; its simulated ones never see PyTorch.
    "rehearsal": [*_MINDSPORE, "hyper_parallel.transport.real.c10d"],
    "torch": ["torch", "hyper_parallel.transport.real.c10d", "hyper_parallel.platform.built"],
}
SERVERS = {"torch": "torch", "mindspore": "rehearsal"}
"""Fork servers of real ranks, by framework."""

FRESH = "fresh"
"""In place of a fork server's name: an interpreter of its own, as msrun starts those of MindSpore on devices."""

_STACK_SECONDS = 2.0
_DIE_SECONDS = 1.0
_TERM_SECONDS = 5.0
_MEASURED_TERM_SECONDS = 30.0  # a measured rank has its coverage data to save, on a machine that may be busy
_LEAVE_SECONDS = 10.0
_SAVE_SECONDS = 10.0  # between two writes of one file
_STEP_SECONDS = 0.1

_LOCK = threading.Lock()
_IDLE: list[Worker] = []  # in the order of their last ranks
_SERVERS: dict[str, _Server] = {}  # those with packages in the order of their last use
_WARM: dict[str, str] = {}  # by server, the packages that it imports
_OPEN: set[Worker] = set()  # those that are not closed
_ENDING: list[int] = []  # process numbers of servers that were let go
_ASKING: set[str] = set()


class _Server(multiprocessing.forkserver.ForkServer):
    """A fork server that ends when this process asks for it."""

    _lock: threading.Lock
    _forkserver_pid: int | None
    _forkserver_alive_fd: int | None
    _forkserver_address: str | None

    def end(self) -> list[int]:
        """Let the server end, without waiting for it; return its process number if it runs."""
        with self._lock:
            running = [] if self._forkserver_pid is None else [self._forkserver_pid]
            if self._forkserver_alive_fd is not None:
                os.close(self._forkserver_alive_fd)  # the server waits for this end of a pipe
            self._forkserver_pid = self._forkserver_alive_fd = self._forkserver_address = None
        return running


class Worker:
    """One warm process and the line to it.

    Args:
        main: what the process runs, called with its end of the line, the path of its stack file and ``args``.
        args: more arguments of ``main``.
        framework: what the process has imported: ``torch``, ``mindspore``, or ``rehearsal``, which is both. Or
            :data:`FRESH`.
        device: number of the device on which it computes for as long as it lives; None for the CPU.
        daemon: False for a process that may start processes of its own by ``multiprocessing``.
    """

    def __init__(
        self,
        main: Callable[..., None] = rank_main,
        args: tuple[object, ...] = (),
        framework: str = "mindspore",
        device: int | None = None,
        *,
        daemon: bool = True,
    ) -> None:
        self.device, self.server = device, framework
        handle, self._stack_path = tempfile.mkstemp(prefix="hyper_parallel_rank_", suffix=".stack")
        os.close(handle)
        self.line, theirs = multiprocessing.Pipe()
        try:
            arguments = (theirs, self._stack_path, *args)
            self.process = start_process(main, arguments, "hyper-parallel-rank", framework, daemon=daemon)
        except BaseException:
            self.line.close()
            theirs.close()
            Path(self._stack_path).unlink()
            raise
        theirs.close()
        try:
            register_rank(self.process.pid or 0, self._stack_path)
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    def ask_for_stack(self) -> None:
        """Let the process write down its stack: see :meth:`last_words`."""
        if self.alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def last_words(self) -> str:
        """The stack that the process wrote down, on request or while it died."""
        return Path(self._stack_path).read_text(encoding="utf-8", errors="replace")

    def how_it_died(self, error: Exception | None = None) -> str:
        """The exit code or signal that ended a process whose line broke, or that it still lives.

        Args:
            error: raised by the line; shown where the exit code is no sign of a failure.
        """
        self.process.join(_DIE_SECONDS)
        code = self.process.exitcode
        how = "lives, but its line broke" if code is None else f"died {exit_text(code)}"
        return how if code or error is None else f"{how} ({error!r})"

    def close(self, *, idle: bool = False) -> None:
        """Let an idle process end, or end one that is busy.

        An idle process leaves when its line closes. It is not signalled meanwhile: it may be writing its coverage data,
        and half a file is useless.
        """
        self.line.close()
        if idle:
            _join(self.process, _LEAVE_SECONDS)
        end_processes([self.process])
        Path(self._stack_path).unlink(missing_ok=True)
        _OPEN.discard(self)


def check_out(world_size: int, device: int | None = None) -> list[Worker]:
    """Live workers for ranks 0 to ``world_size`` - 1: those of the last run first, whatever the size of its world.

    A process can be any rank of any world on its device, so there are as many as the largest world needed.

    Args:
        world_size: number of ranks.
        device: on which they compute; None for the CPU.
    """
    with _LOCK:
        team = [worker for worker in _IDLE if worker.device == device][:world_size]
        _IDLE[:] = [worker for worker in _IDLE if worker not in team]
    for worker in [worker for worker in team if not worker.alive()]:
        worker.close(idle=True)
        team.remove(worker)
    try:
        while len(team) < world_size:
            team.append(Worker() if device is None else Worker(framework=FRESH, device=device))
    except BaseException:
        for worker in team:
            worker.close(idle=True)
        raise
    return team


def check_in(team: list[Worker]) -> None:
    """Return idle workers to the pool."""
    with _LOCK:
        _IDLE[:0] = team


def start_process(
    target: object, args: tuple[object, ...], name: str, framework: str = "mindspore", *, daemon: bool = True
) -> ForkServerProcess:
    """Start a process, from the framework's fork server say; it does not import our ``__main__`` again.

    Args:
        target: what it calls.
        args: with what.
        name: of the process.
        framework: of the fork server; see :data:`SERVERS`. Or :data:`FRESH`.
        daemon: False for a process that may start processes of its own by ``multiprocessing``.
    """
    fresh = framework == FRESH
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    server = nullcontext() if fresh else _server(framework)
    with _LOCK, starting(f"process {name}"), _environment(_WARM.get(framework, "")), _no_main(), server:
        process: ForkServerProcess = context.Process(target=target, args=args, name=name, daemon=daemon)
        process.start()
    return process


def register_rank(pid: int, stack: str, name: str = "hyper-parallel-rank") -> None:
    """Write a started rank into the ledger if there is one.

    Args:
        pid: its process number.
        stack: file into which it writes its stack on SIGUSR1, or "".
        name: how reports call it if it left no data.

    Raises:
        OSError: the ledger cannot be written; the error names the file.
    """
    ledger = os.environ.get(LEDGER_VARIABLE)
    if ledger and Path(ledger).is_dir():
        test = os.environ.get("PYTEST_CURRENT_TEST")
        started = f", started in {test}" if test else ""
        atomic_write_text(Path(ledger) / str(pid), f"{name}{started}\n{stack}")


def preload(framework: str, module: str) -> None:
    """Let ranks of ``framework`` find ``module`` imported; has no effect after its fork server was started."""
    with _LOCK:
        if module not in _PRELOAD[framework]:
            _PRELOAD[framework].append(module)


def warm_server(framework: str, packages: Sequence[str]) -> str:
    """Return the name of the fork server that has imported a framework's modules, and modules or names of packages."""
    chosen = [package for package in packages if package.partition(".")[0] not in _ASKING]
    if not chosen:
        return framework
    name = ",".join([framework, *chosen])
    with _LOCK:
        _PRELOAD.setdefault(name, [*_PRELOAD[framework], "hyper_parallel.transport.simulated.warm_packages"])
        _WARM[name] = ",".join(chosen)
    return name


def asks_for_rank(packages: Sequence[str]) -> None:
    """Leave out packages that must be imported in the rank, in servers that start from now on."""
    with _LOCK:
        _ASKING.update(packages)


def stacks_of(workers: Mapping[int, Worker]) -> dict[int, str]:
    """The current Python stack of each process; all are asked at once and share one time limit."""
    for worker in workers.values():
        worker.ask_for_stack()
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline and any(map(_will_answer, workers.values())):
        time.sleep(0.02)
    return {rank: worker.last_words() or _silence(worker) for rank, worker in workers.items()}


def _will_answer(worker: Worker) -> bool:
    """Whether a stack may still come: the process lives, is not stopped, and has written nothing yet."""
    return worker.alive() and not worker.last_words() and not _is_stopped(worker.process.pid or 0)


def _silence(worker: Worker) -> str:
    """Return why a process wrote down no stack."""
    if not worker.alive():
        return "(the process is gone)"
    return "(the process is stopped)" if _is_stopped(worker.process.pid or 0) else "(the process does not answer)"


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where the system does not report it."""
    return process_state(pid) in ("T", "t")


def end_processes(processes: list[ForkServerProcess]) -> None:
    """SIGTERM, then SIGKILL whatever is left; returns when all have gone.

    A process that writes coverage data may finish that, however long it takes on a busy machine. One that is stopped is
    continued, so that SIGTERM reaches it.
    """
    for process in processes:
        if process.is_alive():
            process.terminate()
            if _is_stopped(process.pid or 0):
                os.kill(process.pid or 0, signal.SIGCONT)
    deadline = time.monotonic() + (_MEASURED_TERM_SECONDS if LEDGER_VARIABLE in os.environ else _TERM_SECONDS)
    for process in processes:
        _join(process, max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            _note_killed(process.pid or 0)
            process.kill()
            process.join()


def _note_killed(pid: int) -> None:
    """Write into the ledger that a rank is ended by SIGKILL, and leaves no coverage data."""
    entry = Path(os.environ.get(LEDGER_VARIABLE, ""), str(pid))
    if entry.is_file():
        name, _, stack = entry.read_text(encoding="utf-8").partition("\n")
        atomic_write_text(entry, f"{name}, killed because it did not react to SIGTERM\n{stack}")


def _join(process: ForkServerProcess, seconds: float) -> None:
    """Wait for a process to end: ``seconds``, and while it writes coverage data, of which half a file is useless."""
    process.join(seconds)
    while process.is_alive() and time.time() - wrote_data_at(process.pid or 0) < _SAVE_SECONDS:
        process.join(_STEP_SECONDS)


@contextmanager
def _environment(packages: str) -> Iterator[None]:
    """Set the variables that a fork server inherits when it starts, and restore them."""
    variables = {**ENVIRONMENT, VARIABLE: packages}
    before = {name: os.environ.get(name) for name in variables}
    path = os.environ.get("PYTHONPATH")
    os.environ.update({name: os.environ.get(name, value) for name, value in variables.items()})
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        yield
    finally:
        for name, value in {**before, "PYTHONPATH": path}.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _server(framework: str) -> Iterator[None]:
    """Start processes inside from the fork server of this framework, which has not imported the other."""
    server = _SERVERS.pop(framework, None)
    if server is None:
        _end_servers()
        server = _Server()
        usual_modules = ["cloudpickle", "hyper_parallel.transport.real.launched_rank"]
        measuring = ["coverage"] if "coverage" in sys.modules else []
        server.set_forkserver_preload([*_PRELOAD[framework], *usual_modules, *measuring])
    _SERVERS[framework] = server
    usual = multiprocessing.forkserver.connect_to_new_process
    multiprocessing.forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        with servers_search_here():
            yield
    finally:
        multiprocessing.forkserver.connect_to_new_process = usual


def _end_servers() -> None:
    """End idle servers with packages of programs but the last one used: each takes the memory of its packages."""
    busy = {worker.server for worker in list(_OPEN)}
    idle = [name for name in _SERVERS if name in _WARM and name not in busy]
    for name in idle[:-1]:
        _ENDING.extend(_SERVERS.pop(name).end())
    _ENDING[:] = [pid for pid in _ENDING if not os.waitpid(pid, os.WNOHANG)[0]]


@contextmanager
def _no_main() -> Iterator[None]:
    """Hide ``__main__``: functions travel by value, so a child must not run the user's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def close_workers() -> None:
    """End every idle worker; the next run starts new ones."""
    with _LOCK:
        workers = list(_IDLE)
        _IDLE.clear()
    for worker in workers:
        worker.line.close()
    for worker in workers:
        worker.close(idle=True)


# Idle ranks leave by themselves, and delete their files, before multiprocessing ends what is left.
atexit.register(close_workers)
# A forked child has copies of them, but they listen to its parent.
os.register_at_fork(after_in_child=_IDLE.clear)
os.register_at_fork(after_in_child=_OPEN.clear)
os.register_at_fork(after_in_child=_SERVERS.clear)
os.register_at_fork(after_in_child=_ENDING.clear)

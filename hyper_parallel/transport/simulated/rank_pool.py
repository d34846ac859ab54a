"""Warm worker processes: started from a fork server with the framework imported, and reused between runs."""

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
"""Environment variable with a folder in which every started rank creates a file named after its process id.

A check of the tests' coverage compares these files with the coverage data that the ranks left. Unset the variable for a
rank that is killed on purpose."""

ENVIRONMENT = {"MS_DEV_LAUNCH_BLOCKING": "1", "GLOG_v": "4"}
"""Default environment of ranks: MindSpore runs its operators synchronously, so that an error appears at the operator
that failed and ranks wait less on few cores; it logs only critical errors."""

_MINDSPORE = [
    "mindspore",
    "hyper_parallel.transport.real.mindspore.transport",
    "hyper_parallel.platform.built",
]
_PRELOAD = {
    "mindspore": _MINDSPORE,
    # MindSpore's real processes on CPU use gloo from PyTorch; its simulated ones never import PyTorch.
    "rehearsal": [*_MINDSPORE, "hyper_parallel.transport.real.c10d"],
    "torch": ["torch", "hyper_parallel.transport.real.c10d", "hyper_parallel.platform.built"],
}
SERVERS = {"torch": "torch", "mindspore": "rehearsal"}
"""Fork servers of real ranks, by framework."""

FRESH = "fresh"
"""Given instead of a fork server's name to start a fresh interpreter, as msrun does for MindSpore on devices."""

_STACK_SECONDS = 2.0
_DIE_SECONDS = 1.0
_TERM_SECONDS = 5.0
_MEASURED_TERM_SECONDS = 30.0  # a measured rank needs time to save its coverage data, on a possibly busy machine
_LEAVE_SECONDS = 10.0
_SAVE_SECONDS = 10.0  # interval between two writes of one file
_STEP_SECONDS = 0.1

_LOCK = threading.Lock()
_IDLE: list[Worker] = []  # workers of the last run first, in the order of their ranks
_SERVERS: dict[str, _Server] = {}  # servers with packages are ordered by their last use
_WARM: dict[str, str] = {}  # packages that a server imports, by server
_OPEN: set[Worker] = set()  # workers that are not closed
_ENDING: list[int] = []  # process ids of servers that were told to end
_ASKING: dict[str, Sequence[str]] = {}  # packages that servers must not import, and modules that they import


class _Server(multiprocessing.forkserver.ForkServer):
    """A fork server that ends on request of this process."""

    _lock: threading.Lock
    _forkserver_pid: int | None
    _forkserver_alive_fd: int | None
    _forkserver_address: str | None

    def end(self) -> list[int]:
        """Request the server's end without waiting; return its process id if it runs."""
        with self._lock:
            running = [] if self._forkserver_pid is None else [self._forkserver_pid]
            if self._forkserver_alive_fd is not None:
                os.close(self._forkserver_alive_fd)  # closing this end of a pipe ends the server
            self._forkserver_pid = self._forkserver_alive_fd = self._forkserver_address = None
        return running


class Worker:
    """One warm process and the connection to it.

    Args:
        main: main function of the process, called with its end of the connection, the path of its stack file and
            ``args``.
        args: more arguments of ``main``.
        framework: framework that the process has imported: ``torch``, ``mindspore``, or ``rehearsal`` for both. Or
            :data:`FRESH`.
        device: number of its device, which never changes; None for the CPU.
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
        """Let the process write its stack to a file; see :meth:`last_words`."""
        if self.alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def last_words(self) -> str:
        """Return the stack that the process wrote, on request or while it died."""
        return Path(self._stack_path).read_text(encoding="utf-8", errors="replace")

    def how_it_died(self, error: Exception | None = None) -> str:
        """Return the exit code or signal of a process whose connection broke, or that it is still alive.

        Args:
            error: error of the connection; shown if the exit code does not indicate a failure.
        """
        self.process.join(_DIE_SECONDS)
        code = self.process.exitcode
        how = "is alive, but its connection broke" if code is None else f"died {exit_text(code)}"
        return how if code or error is None else f"{how} ({error!r})"

    def close(self, *, idle: bool = False) -> None:
        """Let an idle process end, or end a busy one.

        An idle process exits when its connection closes. It gets no signal meanwhile, because it may be writing its
        coverage data, and an incomplete file is useless.
        """
        self.line.close()
        if idle:
            _join(self.process, _LEAVE_SECONDS)
        end_processes([self.process])
        Path(self._stack_path).unlink(missing_ok=True)
        _OPEN.discard(self)


def check_out(world_size: int, device: int | None = None) -> list[Worker]:
    """Return live workers for ranks 0 to ``world_size`` - 1, preferring those of the last run of any world size.

    A process can be any rank of any world on its device, so there are as many processes as the largest world needed.

    Args:
        world_size: number of ranks.
        device: number of their device; None for the CPU.
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
    """Start a process from a fork server or in a fresh interpreter; it does not import ``__main__`` again.

    Args:
        target: function that it calls.
        args: arguments of ``target``.
        name: name of the process.
        framework: framework of the fork server, see :data:`SERVERS`; or :data:`FRESH`.
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
        pid: process id of the rank.
        stack: file that receives its stack on SIGUSR1, or "".
        name: name in reports if it left no data.

    Raises:
        OSError: the ledger cannot be written; the error names the file.
    """
    ledger = os.environ.get(LEDGER_VARIABLE)
    if ledger and Path(ledger).is_dir():
        test = os.environ.get("PYTEST_CURRENT_TEST")
        started = f", started in {test}" if test else ""
        atomic_write_text(Path(ledger) / str(pid), f"{name}{started}\n{stack}")


def preload(framework: str, module: str) -> None:
    """Let ranks of ``framework`` start with ``module`` imported; no effect after its fork server was started."""
    with _LOCK:
        if module not in _PRELOAD[framework]:
            _PRELOAD[framework].append(module)


def warm_server(framework: str, packages: Sequence[str]) -> str:
    """Return the name of the fork server that has imported a framework's modules, and other modules or packages.

    The server does not import packages that read their rank during import. Instead it imports the modules of other
    packages that these import.
    """
    tops = [package.partition(".")[0] for package in packages]
    others = [module for top in dict.fromkeys(tops) for module in _ASKING.get(top, ())]
    every = dict.fromkeys([*others, *packages])
    chosen = [package for package in every if package.partition(".")[0] not in _ASKING]
    if not chosen:
        return framework
    name = ",".join([framework, *chosen])
    with _LOCK:
        _PRELOAD.setdefault(name, [*_PRELOAD[framework], "hyper_parallel.transport.simulated.warm_packages"])
        _WARM[name] = ",".join(chosen)
    return name


def asks_for_rank(packages: Mapping[str, Sequence[str]]) -> None:
    """Do not import these packages in servers that start later, because they read their rank during import.

    Args:
        packages: for each package, the modules that it imports from other packages.
    """
    with _LOCK:
        for package, modules in packages.items():
            _ASKING[package] = [*_ASKING.get(package, ()), *modules]


def stacks_of(workers: Mapping[int, Worker]) -> dict[int, str]:
    """Return the current Python stack of each process; all are requested at once, within one time limit."""
    for worker in workers.values():
        worker.ask_for_stack()
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline and any(map(_will_answer, workers.values())):
        time.sleep(0.02)
    return {rank: worker.last_words() or _silence(worker) for rank, worker in workers.items()}


def _will_answer(worker: Worker) -> bool:
    """Whether a stack may still arrive: the process is alive, not stopped, and has written nothing yet."""
    return worker.alive() and not worker.last_words() and not _is_stopped(worker.process.pid or 0)


def _silence(worker: Worker) -> str:
    """Return the reason why a process wrote no stack."""
    if not worker.alive():
        return "(the process is gone)"
    return "(the process is stopped)" if _is_stopped(worker.process.pid or 0) else "(the process does not answer)"


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where the system does not report it."""
    return process_state(pid) in ("T", "t")


def end_processes(processes: list[ForkServerProcess]) -> None:
    """Send SIGTERM, then SIGKILL to the remaining processes; return when all have exited.

    A process that is writing coverage data may finish that without a time limit. A stopped process is continued, so
    that SIGTERM reaches it.
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
    """Record in the ledger that a rank is ended by SIGKILL and leaves no coverage data."""
    entry = Path(os.environ.get(LEDGER_VARIABLE, ""), str(pid))
    if entry.is_file():
        name, _, stack = entry.read_text(encoding="utf-8").partition("\n")
        atomic_write_text(entry, f"{name}, killed because it did not react to SIGTERM\n{stack}")


def _join(process: ForkServerProcess, seconds: float) -> None:
    """Wait for a process to end, for ``seconds`` and for as long as it writes coverage data."""
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
    """Context in which processes start from the fork server of this name, which is started if it does not run."""
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
    """End idle servers with packages of programs, except the one used last, since they occupy memory."""
    busy = {worker.server for worker in list(_OPEN)}
    idle = [name for name in _SERVERS if name in _WARM and name not in busy]
    for name in idle[:-1]:
        _ENDING.extend(_SERVERS.pop(name).end())
    _ENDING[:] = [pid for pid in _ENDING if not _has_ended(pid)]


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # another wait of this process took its status
        return True


@contextmanager
def _no_main() -> Iterator[None]:
    """Hide ``__main__``: functions are pickled by value, so a child must not run the user's script again."""
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


# Idle ranks exit and delete their files themselves, before multiprocessing ends the remaining ones.
atexit.register(close_workers)
# A forked child has copies of the workers, but they belong to its parent.
os.register_at_fork(after_in_child=_IDLE.clear)
os.register_at_fork(after_in_child=_OPEN.clear)
os.register_at_fork(after_in_child=_SERVERS.clear)
os.register_at_fork(after_in_child=_ENDING.clear)

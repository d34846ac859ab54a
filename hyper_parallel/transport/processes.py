"""Starts, pins and ends Python processes.

The processes search the same paths for modules as this one. ``python -m`` and ``python -c`` would search the current
folder first: in a checkout, a rank would then import the package from there, but its parent the installed one.

Simulated ranks run in turn and switch thousands of times a second, and so do the threads of MindSpore's pool, which
spin while they wait. A rank or thread that runs next on a different CPU must be woken first. On two cores, waking ranks
took as long as all other work together, and an operator of MindSpore took three times as much processor time. So
processes that run in turn share one CPU.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ENGINE_VARIABLE",
    "SharedFile",
    "available",
    "end_ranks",
    "end_session",
    "free_port",
    "local_environment",
    "process_state",
    "python_command",
    "rehearsed_engine",
    "search_path",
    "servers_search_here",
    "stay_on",
    "torchrun_environment",
]

ENGINE_VARIABLE = "HYPER_PARALLEL_ENGINE_RULES"
"""Environment variable that names the engine, nccl or hccl, whose rules apply on CPU; unset or empty: none."""

_GLOO_INTERFACE, _LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
_STATE = "/proc/{}/stat"
_SERVER = "from multiprocessing.forkserver import main; "


def end_session(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process that leads its own session, with all processes in it; do nothing if it has ended.

    Args:
        process: the process.
        seconds: number of seconds between SIGTERM and SIGKILL.
    """
    for stop in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, stop)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def search_path() -> list[str]:
    """Return ``sys.path`` with the current folder in place of an empty entry, for a process in a different folder."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def local_environment() -> dict[str, str]:
    """The environment of ranks that are all on this machine: gloo listens on loopback by default."""
    names = {name for _, name in socket.if_nameindex()}
    return {**({_GLOO_INTERFACE: _LOOPBACK} if _LOOPBACK in names else {}), **os.environ}


def torchrun_environment(rank: int, world_size: int, port: str) -> dict[str, str]:
    """The variables that torchrun sets on a rank of one machine; ``port`` is the port of the rendezvous."""
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size))
    group = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    return {**own, **sizes, **group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def free_port() -> str:
    """A port of this machine at which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def rehearsed_engine() -> str:
    """The engine that :data:`ENGINE_VARIABLE` names; empty for none."""
    return os.environ.get(ENGINE_VARIABLE, "")


def python_command(module: str, *arguments: str) -> list[str]:
    """``python -m module arguments`` with the search path of this process and no other."""
    code = f"{_searching_here()}import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code, *arguments]


class SharedFile:
    """An open file of this process, as an argument of a process that a fork server starts.

    Args:
        number: the file's descriptor in this process; in the started process, ``number`` is its descriptor there.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_file, (reduction.DupFd(self.number),)


def _received_file(duplicate: Any) -> SharedFile:
    return SharedFile(duplicate.detach())


@contextmanager
def servers_search_here() -> Iterator[None]:
    """Inside this context, a fork server starts with this process's ``sys.path``.

    The standard library has no way to do that (from Python 3.11 on there is PYTHONSAFEPATH, which the ranks' own
    children would inherit). Callers hold a lock.
    """
    usual = multiprocessing.util.spawnv_passfds

    def start(path: Any, args: Any, passfds: Any) -> int:
        *options, code = args
        if code.startswith(_SERVER):
            code = _searching_here() + code
        return usual(path, [*options, code], passfds)

    multiprocessing.util.spawnv_passfds = start
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = usual


def _searching_here() -> str:
    return f"import sys; sys.path[:] = {search_path()!r}; "


def end_ranks() -> None:
    """End the warm ranks that were started; they save their coverage data and delete their files."""
    for module, close in (
        ("real.launched_processes", "close_launched_teams"),
        ("simulated.rank_pool", "close_workers"),
    ):
        loaded: Any = sys.modules.get(f"hyper_parallel.transport.{module}")
        if loaded is not None:
            getattr(loaded, close)()


def process_state(pid: int) -> str:
    """Return the letter of a process's state, such as ``T`` for stopped; empty where the system does not report it."""
    try:
        state = Path(_STATE.format(pid)).read_text(encoding="utf-8", errors="replace")
    except OSError:  # no such files on this system, or the process has gone
        return ""
    return state.rpartition(") ")[2][:1]


def available() -> list[int]:
    """Numbers of the CPUs that this process may use; empty where the system does not report them."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def stay_on(seat: int) -> None:
    """Keep this thread, and the threads and processes that it starts from now on, on one CPU.

    Args:
        seat: index of the CPU among those available, modulo their number. No effect where processes cannot be bound.
    """
    if sys.platform == "linux":
        allowed = available()
        os.sched_setaffinity(0, {allowed[seat % len(allowed)]})

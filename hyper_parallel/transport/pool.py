"""Warm worker processes: started from a fork server that has MindSpore imported, reused from run to run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from hyper_parallel.transport.worker_main import worker_main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import ForkServerProcess

__all__ = ["Worker", "check_in", "check_out", "close_all", "end_processes", "start_process"]

# Read by MindSpore at import: errors at the operator that fails (and far less waiting on few cores); a quiet log.
_ENVIRONMENT = {"MS_DEV_LAUNCH_BLOCKING": "1", "GLOG_v": "4"}
_PRELOAD = ["mindspore", "cloudpickle", "hyper_parallel.transport.mindspore", "hyper_parallel.transport.worker_main"]
_STACK_SECONDS = 0.5
_TERM_SECONDS = 3.0

_LOCK = threading.Lock()
_IDLE: dict[int, list[list[Worker]]] = {}


class Worker:
    """One warm process and the line to it."""

    def __init__(self) -> None:
        handle, self._stack_path = tempfile.mkstemp(prefix="hyper_parallel_rank_", suffix=".stack")
        os.close(handle)
        self.line, theirs = multiprocessing.Pipe()
        self.process = start_process(worker_main, (theirs, self._stack_path), "hyper-parallel-rank")
        theirs.close()

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    def stack(self) -> str:
        """The Python stack of what the process is doing now."""
        if not self.alive():
            return "(the process is gone)"
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        text = ""
        while time.monotonic() < deadline and not text:
            time.sleep(0.02)
            with open(self._stack_path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                text = file.read()
        return text or "(the process does not answer)"

    def close(self) -> None:
        """Let an idle process end, or kill one that does not."""
        self.line.close()
        end_processes([self.process])
        if os.path.exists(self._stack_path):  # noqa: PTH110
            os.unlink(self._stack_path)  # noqa: PTH108


def check_out(world_size: int) -> list[Worker]:
    """Live workers for ranks 0 to ``world_size`` - 1: the same processes as last time, if they are idle and well."""
    with _LOCK:
        idle = _IDLE.get(world_size, [])
        team = idle.pop() if idle else []
    if team and all(worker.alive() for worker in team):
        return team
    for worker in team:
        worker.close()
    return [Worker() for _ in range(world_size)]


def check_in(team: list[Worker]) -> None:
    """Give workers back that wait for their next task."""
    with _LOCK:
        _IDLE.setdefault(len(team), []).append(team)


def start_process(target: object, args: tuple[object, ...], name: str) -> ForkServerProcess:
    """Start a daemon process from the fork server; it does not import this process's ``__main__`` again."""
    context = multiprocessing.get_context("forkserver")
    with _LOCK, _environment(), _no_main():
        context.set_forkserver_preload(_PRELOAD)
        process = context.Process(target=target, args=args, name=name, daemon=True)  # type: ignore[arg-type]
        process.start()
    return process


def end_processes(processes: list[ForkServerProcess]) -> None:
    """SIGTERM, then SIGKILL whatever is left; returns when all have gone."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _TERM_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _environment() -> Iterator[None]:
    """The fork server inherits these when it first starts; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    path = os.environ.get("PYTHONPATH")
    os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
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
def _no_main() -> Iterator[None]:
    """Functions travel by value, so a child has no need to run the user's script a second time."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def close_all() -> None:
    """End every idle worker; the next run starts new ones."""
    with _LOCK:
        teams = [team for teams in _IDLE.values() for team in teams]
        _IDLE.clear()
    for team in teams:
        for worker in team:
            worker.line.close()
    for team in teams:
        for worker in team:
            worker.close()

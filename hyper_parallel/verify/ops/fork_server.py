"""Fork server: imports the framework once and forks a worker per task, so that a crash affects only one operator.

``python -m hyper_parallel.verify.ops.fork_server torch FD`` reads tasks as lines of JSON from stdin and writes events
as lines of JSON to file descriptor FD. The server never runs an operator itself, because forking afterwards hangs
MindSpore. On Ascend devices, a MindSpore worker is not forked but a fresh interpreter, as MindSpore's ranks are there.

``transport/simulated/rank_pool.py`` uses the fork server of multiprocessing instead. It is unsuitable here: a worker
starts ranks as child processes, which a daemonic process must not do, and the parent needs the worker's stderr for the
traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

from hyper_parallel.transport.processes import end_ranks, python_command, stay_on
from hyper_parallel.transport.real.cluster import meets_in_cluster

__all__ = ["main"]

_SHOWN = 2000  # maximum number of characters of a worker's stderr that are reported
_MOST_OPERATORS = 100  # assumed number of operators in a user's file
_THIS = "hyper_parallel.verify.ops.fork_server"
# PyTorch imports it at the first elementwise call on meta tensors, which takes a second in each worker.
_PRELOAD = {"torch": ["torch._dynamo"]}
_WATCHDOG = "Timeout ("  # the line that faulthandler writes above the stacks


def main(platform: str, out: int) -> None:
    """Run tasks until stdin closes."""
    from hyper_parallel.platform.select import MissingFrameworkError, platform_named
    from hyper_parallel.verify.ops import tasks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        platform_named(platform)
    except MissingFrameworkError:  # the command that started this process reports it
        sys.exit(1)
    for module in _PRELOAD.get(platform, ()):
        importlib.import_module(module)
    for line in sys.stdin:
        task = json.loads(line)
        died = _run_in_worker(task, out, tasks.run)
        _send(out, {"event": "end", "died": died})


def _run_in_worker(task: dict[str, Any], out: int, run: Any) -> str:
    """Run a task in a forked worker; return the cause of its death, or an empty text if it ended normally."""
    stderr_read, stderr_write = os.pipe()
    child = os.fork()
    if not child:
        os.close(stderr_read)
        if meets_in_cluster(task.get("platform", ""), task.get("effort", {}).get("device", "cpu")):
            _become_fresh(task, out, stderr_write)
        _worker_main(task, out, stderr_write, run)
    os.close(stderr_write)
    text, late = _read_stderr(child, stderr_read, task["seconds"] * _operators(task))
    os.close(stderr_read)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    _, watched, stacks = text.rpartition(_WATCHDOG)
    if late or (code == 1 and watched):
        text = (watched + stacks if watched else text)[:_SHOWN]
        return f"did not finish within {task['seconds']:g} s" + (f"\n{text}" if text else "")
    text = text[-_SHOWN:]
    if code == 0:
        return ""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with status {code}"
    return how + (f"\n{text}" if text else "")


def _operators(task: dict[str, Any]) -> int:
    """Return the number of operators of a task, for its time limit; the worker also limits the time per operator."""
    return _MOST_OPERATORS if task["ops"] == ["*"] else len(task["ops"]) + 1


def _read_stderr(child: int, stderr: int, seconds: float) -> tuple[str, bool]:
    """Read a worker's stderr until it is closed; return the text, and whether the worker exceeded its time limit."""
    deadline, text = time.monotonic() + seconds, b""
    while True:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([stderr], [], [], max(left, 0.0))
        if not ready:
            os.kill(child, signal.SIGKILL)
            return text.decode(errors="replace"), True
        part = os.read(stderr, 65536)
        if not part:
            return text.decode(errors="replace"), False
        text = (text + part)[-65536:]


def _become_fresh(task: dict[str, Any], out: int, stderr: int) -> None:
    """Replace this process by a fresh interpreter, which continues with the task."""
    for number in (out, stderr):
        os.set_inheritable(number, True)
    command = python_command(_THIS, task["platform"], str(out), json.dumps(task), str(stderr))
    os.execv(command[0], command)  # noqa: S606 - this interpreter, this package


def _fresh_worker(platform: str, out: int, task: str, stderr: int) -> None:
    """Run one task in this fresh process."""
    from hyper_parallel.platform.select import platform_named
    from hyper_parallel.verify.ops import tasks

    platform_named(platform)
    _worker_main(json.loads(task), out, stderr, tasks.run)


def _worker_main(task: dict[str, Any], out: int, stderr: int, run: Any) -> None:
    code = 1
    try:
        os.dup2(stderr, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        faulthandler.enable()
        stay_on(task["seat"])
        run(task, lambda event: _send(out, event))
        end_ranks()  # a child that leaves with os._exit runs no exit hooks
        code = 0
    except BaseException:  # noqa: BLE001 - the parent must see any exception
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # The framework's own exit hooks may wait for threads that a forked process does not have.
        os._exit(code)


def _send(out: int, event: dict[str, Any]) -> None:
    data = (json.dumps(event) + "\n").encode()
    try:
        while data:
            data = data[os.write(out, data) :]
    except BrokenPipeError:
        os._exit(1)  # the parent has exited


if __name__ == "__main__":
    if len(sys.argv) > 3:
        _fresh_worker(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    main(sys.argv[1], int(sys.argv[2]))

"""A process that has the framework imported and forks a child per task: a native crash costs one operator.

``python -m hyper_parallel.verify.ops.fork_server torch FD`` reads tasks as lines of JSON from stdin and writes its
events as lines of JSON to file descriptor FD. It never runs an operator itself: forking afterwards hangs MindSpore.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
from typing import Any

from hyper_parallel.transport.processes import end_ranks, stay_on

__all__ = ["main"]

_SHOWN = 2000  # characters of what a child said
_MANY = 100
_WATCHDOG = "Timeout ("  # what faulthandler writes above the stacks


def main(platform: str, out: int) -> None:
    """Serve tasks until stdin closes."""
    from hyper_parallel.platform.select import platform_named
    from hyper_parallel.verify.ops import tasks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    platform_named(platform)
    for line in sys.stdin:
        task = json.loads(line)
        died = _in_child(task, out, tasks.run)
        _say(out, {"event": "end", "died": died})


def _in_child(task: dict[str, Any], out: int, run: Any) -> str:
    """Run the task in a forked child; how it died, or nothing."""
    trouble, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(trouble)
        _child(task, out, theirs, run)
    os.close(theirs)
    text, late = _listen(child, trouble, task["seconds"] * _operators(task))
    os.close(trouble)
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
    """As many as there can be; the child itself watches over each, unless it cannot any more."""
    return _MANY if task["ops"] == ["*"] else len(task["ops"]) + 1


def _listen(child: int, trouble: int, seconds: float) -> tuple[str, bool]:
    """What the child writes to stderr until it closes it, and whether it had to be killed for being late."""
    deadline, text = time.monotonic() + seconds, b""
    while True:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([trouble], [], [], max(left, 0.0))
        if not ready:
            os.kill(child, signal.SIGKILL)
            return text.decode(errors="replace"), True
        part = os.read(trouble, 65536)
        if not part:
            return text.decode(errors="replace"), False
        text = (text + part)[-65536:]


def _child(task: dict[str, Any], out: int, trouble: int, run: Any) -> None:
    code = 1
    try:
        os.dup2(trouble, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        faulthandler.enable()
        stay_on(task["seat"])
        run(task, lambda event: _say(out, event))
        end_ranks()  # a child that leaves with os._exit runs no exit hooks
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # The framework's own exit hooks may wait for threads that a forked process does not have.
        os._exit(code)


def _say(out: int, event: dict[str, Any]) -> None:
    data = (json.dumps(event) + "\n").encode()
    try:
        while data:
            data = data[os.write(out, data) :]
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Which of several programs shows a wrong value: each runs in two new processes that talk over gloo.

``python -m hyper_parallel.platform.torch.peer_confirm`` reads programs from standard input, a JSON list, and prints
``{"index", "printed"}`` of the first that prints a wrong value and fails, or ``null``. PyTorch is imported once; the
processes are forked, so that each starts from the same state, whatever the one before it did.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType

__all__ = ["main"]

_WORLD = 2
_SECONDS = 20.0
_SHARED = ("torch", "torch.distributed.tensor", "torch._dynamo")  # what every program imports, once


def main() -> None:
    """Run them one after the other."""
    for name in _SHARED:
        importlib.import_module(name)
    found = None
    for index, program in enumerate(json.load(sys.stdin)):
        printed = _printed(program)
        if printed is not None:
            found = {"index": index, "printed": printed}
            break
    sys.stdout.write(json.dumps(found) + "\n")


def _printed(program: str) -> str | None:
    """What rank 0 printed, where the program fails on a wrong value; else None."""
    with tempfile.TemporaryDirectory() as folder:
        code = compile(program, "reproducer.py", "exec")
        port = _free_port()
        children = [_forked(code, rank, port, Path(folder)) for rank in range(_WORLD)]
        _wait(children)
        said = [(Path(folder) / f"{rank}.{kind}") for kind in ("out", "err") for rank in range(_WORLD)]
        out, _, *errors = [one.read_text(encoding="utf-8", errors="replace") for one in said]
    lines = " ".join(out.split())
    wrong = " should be " in lines and any("AssertionError: " in one for one in errors)
    return lines if wrong else None


def _forked(code: CodeType, rank: int, port: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    for kind, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{rank}.{kind}", os.O_CREAT | os.O_WRONLY, 0o600), number)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(_WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 0
    try:
        exec(code, {"__name__": "__main__"})  # noqa: S102 - our own program
    except BaseException:  # noqa: BLE001 - it is what we look for
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(children: list[int]) -> None:
    """Until all have ended; those that wait for each other are stopped."""
    until = time.monotonic() + _SECONDS
    left = set(children)
    while left:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        if left and time.monotonic() > until:
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()

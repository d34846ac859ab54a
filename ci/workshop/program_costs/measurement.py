"""Processor time, memory and wall time of a command with all the processes that it starts, on Linux."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cost", "cost_of"]

_MARK = "HP_MEASURED_COMMAND"
_INTERVAL = 0.2


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        seconds: of wall time.
        processor: seconds of processor time of all processes; those that live for less than the interval are missed.
        memory: largest sum of their proportional shares of memory, in bytes.
        status: exit status.
        output: the end of what it printed.
    """

    seconds: float
    processor: float
    memory: int
    status: int
    output: str


def cost_of(command: Sequence[str], folder: Path) -> Cost:
    """Run a command in ``folder`` and return its cost.

    Processes are found by a variable in their environment, which they inherit: fork servers and daemons included.
    """
    value = uuid.uuid4().hex
    mark = f"{_MARK}={value}".encode()
    times: dict[int, float] = {}
    peak = 0
    started = time.monotonic()
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            list(command), cwd=folder, env={**os.environ, _MARK: value}, stdout=output, stderr=subprocess.STDOUT
        )
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_INTERVAL)
            peak = max(peak, _look(mark, times))
        seconds = time.monotonic() - started
        output.seek(0)
        text = output.read()
    return Cost(seconds, sum(times.values()), peak, process.returncode, text[-4000:])


def _look(mark: bytes, times: dict[int, float]) -> int:
    """Note the processor time of the marked processes, and return the sum of their memory in bytes."""
    memory = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            lines = (folder / "smaps_rollup").read_text().splitlines()
            memory += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return memory

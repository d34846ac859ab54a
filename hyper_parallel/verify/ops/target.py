"""The same samples on somebody else's distributed tensors: ranks are real processes, started here."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.transport.processes import python_command

__all__ = ["TARGETS", "Audited", "audit", "summary"]

TARGETS = {"torch-dtensor": ("torch", "hyper_parallel.platform.torch.peer")}
"""Targets: the framework that each needs, and the module that has them."""

_CONFIRM = {"torch-dtensor": "hyper_parallel.platform.torch.peer_confirm"}
_MOST_SECONDS = 120.0

_WORLD = 2
_SECONDS = 90.0


@dataclass
class Audited:
    """What became of one operator.

    Attributes:
        op: canonical name.
        counts: placements by outcome: ``ok``, ``rejects``, ``wrong``, ``crash``, ``plain``.
        shown: the first of each kind that should not be.
        program: prints the first wrong value, if it can be said in few lines.
        printed: what it printed on two new processes, or nothing.
    """

    op: str
    counts: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    program: str | None = None
    printed: str = ""

    @property
    def outcome(self) -> str:
        """The worst that happened; ``unexercised`` where nothing did."""
        return next((one for one in ("wrong", "crash", "plain", "rejects", "ok") if self.counts[one]), "unexercised")

    def text(self) -> str:
        """One line, one for each kind of finding, and a program that shows the wrong one."""
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())) or "no sample"
        return "\n".join(
            [f"{self.outcome:<12}{self.op}: {counts}", *(f"    {one}" for one in self.shown), *self._told()]
        )

    def _told(self) -> list[str]:
        if not self.counts["wrong"]:
            return []
        if self.program is None:
            return ["    no program of few lines shows it"]
        seen = f"prints {self.printed}"[:200] if self.printed else "needs what the operators before it left behind"
        return [f"    reproducer, {seen}", *(f"        {line}" for line in self.program.split("\n"))]

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {"op": self.op, "outcome": self.outcome, "counts": dict(self.counts), "shown": self.shown,
                "program": self.program, "printed": self.printed}  # fmt: skip


def audit(target: str, ops: Sequence[str]) -> Iterator[Audited]:
    """One report per operator, whatever happens to the processes."""
    left = list(ops)
    while left:
        current = left[0]
        with tempfile.TemporaryDirectory() as folder:
            for line in _lines(target, left, Path(folder) / "store"):
                if "begin" in line:
                    current = line["begin"]
                else:
                    left.remove(line["op"])
                    program, printed = reproduced(target, line.get("programs", []))
                    yield Audited(line["op"], Counter(line["counts"]), line["shown"], program, printed)
        if left:  # they died, or one waits for the other
            left.remove(current)
            yield Audited(current, Counter(crash=1), [f"crash: its processes died or did not finish in {_SECONDS:g} s"])


def reproduced(target: str, programs: Sequence[str]) -> tuple[str | None, str]:
    """The first of ``programs`` that prints a wrong value on two new processes, and what it prints.

    Where none does, the first of all, and nothing.
    """
    if not programs:
        return None, ""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter, this package
            python_command(_CONFIRM[target]),
            input=json.dumps(list(programs)), capture_output=True, text=True, env=environment,
            timeout=_MOST_SECONDS, check=True,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return programs[0], ""
    found = json.loads(ended.stdout)
    return (programs[0], "") if found is None else (programs[found["index"]], found["printed"])


def summary(target: str, found: Sequence[Audited]) -> str:
    """Operators by the worst that happened, and how many lines are above."""
    counts = Counter(one.outcome for one in found)
    checks = sum((one.counts for one in found), Counter[str]())
    operators = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    placements = ", ".join(f"{count} {name}" for name, count in checks.most_common())
    lines = sum(one.text().count("\n") + 1 for one in found if one.outcome != "ok")
    return f"{target}: {len(found)} operators ({operators}); placements: {placements}; {lines} lines of findings"


def _lines(target: str, ops: Sequence[str], store: Path) -> Iterator[dict[str, Any]]:
    """What rank 0 says until it ends, or says nothing for too long."""
    _, module = TARGETS[target]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ranks = [
        subprocess.Popen(  # noqa: S603 - this interpreter, this package
            python_command("hyper_parallel.verify.ops.audit", module, str(rank), str(store), *ops),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
        )
        for rank in range(_WORLD)
    ]  # fmt: skip
    try:
        assert ranks[0].stdout is not None
        yield from _heard(ranks[0].stdout.fileno())
    finally:
        for one in ranks:
            one.kill()
            one.wait()
        assert ranks[0].stdout is not None
        ranks[0].stdout.close()


def _heard(source: int) -> Iterator[dict[str, Any]]:
    rest, until = b"", time.monotonic() + _SECONDS
    with selectors.DefaultSelector() as chosen:
        chosen.register(source, selectors.EVENT_READ)
        while chosen.select(max(until - time.monotonic(), 0.0)):
            data = os.read(source, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            until = time.monotonic() + _SECONDS
            yield from map(json.loads, lines)

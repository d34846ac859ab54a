"""Verifies a configuration with a seeded bug, as it is and as ``hyper-parallel reduce`` makes it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.seeded.cases import CASES, Case

__all__ = ["SIZES", "Outcome", "outcome", "reduced"]

SIZES = ("full", "reduced")
PROGRAM = Path(__file__).parent / "torch" / "decoder.py"
_TIMEOUT = 1200
_STEPS = 1


@dataclass(frozen=True)
class Outcome:
    """What ``verify program`` said.

    Attributes:
        case: name of the configuration.
        bug: name of the bug; ``""`` for the program without one.
        size: ``full`` or ``reduced``.
        ranks: number of ranks.
        status: exit status: 1 if a difference was found.
        first: the value that is wrong first, or the end of what was printed if the command failed.
        seconds: wall time.
    """

    case: str
    bug: str
    size: str
    ranks: int
    status: int
    first: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether a bug was found, or a right program passed."""
        return self.status == (1 if self.bug else 0)


def reduced(case: Case) -> Case:
    """Return the case that ``hyper-parallel reduce`` makes of one, with the same bugs."""
    from hyper_parallel.verify.reduce.document import read_document
    from hyper_parallel.verify.reduce.reduction import reduce_document

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(case.config), encoding="utf-8")
        reduction = reduce_document(read_document(path), case.mesh)
    axes = reduction.structure.axes
    return Case(json.loads(reduction.text), {axis: axes[axis][1] for axis in case.mesh}, case.bugs)


def outcome(name: str, bug: str, size: str) -> Outcome:
    """Verify a case.

    Args:
        name: name of the case.
        bug: name of the bug; ``""`` for none.
        size: ``full`` or ``reduced``.
    """
    case = CASES[name] if size == "full" else reduced(CASES[name])
    ranks = math.prod(count for axis, count in case.mesh.items() if axis != "ep")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config, report = Path(folder, "config.json"), Path(folder, "report.json")
        config.write_text(json.dumps(case.config), encoding="utf-8")
        mesh = ",".join(f"{axis}={count}" for axis, count in case.mesh.items())
        command = [
            sys.executable, "-m", "hyper_parallel", "verify", "program", str(PROGRAM), "--world-size", str(ranks),
            "--timeout", str(_TIMEOUT), "--report", str(report),
            "--", "--config", str(config), "--mesh", mesh, "--steps", str(_STEPS), "--bug", bug,
        ]  # fmt: skip
        # Operations are so small that several threads per process only wait for each other.
        alone = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
        first = _first(json.loads(report.read_text(encoding="utf-8"))) if report.exists() else ""
    if done.returncode not in {0, 1}:
        first = first or "".join(done.stderr.strip().splitlines()[-1:])
    return Outcome(name, bug, size, ranks, done.returncode, first, time.monotonic() - started)


def _first(report: Mapping[str, Any]) -> str:
    """Return the value that is wrong first, or why there is no verdict."""
    first = (report["verdict"] or {}).get("first")
    if first is None:
        return str(report["failure"] or report["inconclusive"] or "")
    return f"{first['kind']} {first['name']}"

"""Starts the worlds in which training steps and a checkpoint are compared with PyTorch's own parallelism.

Ranks are processes over gloo that torchrun starts, as users start them, without a coordinator.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.transport.processes import python_command
from workshop.bench.turns import BenchmarkRow

__all__ = ["WORLDS", "training_rows"]

WORLDS = (2, 4)
"""Numbers of ranks."""

_PROGRAM = "workshop.bench.torch.training"
_END = 2000  # characters of what failing ranks printed


def training_rows(ranks: int) -> Iterator[BenchmarkRow]:
    """Measure the rows of one world; takes about a minute.

    Args:
        ranks: of the world.

    Raises:
        RuntimeError: ranks failed; the message has the end of what they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "rows.json")
        options = ["--standalone", f"--nproc-per-node={ranks}", "-m", _PROGRAM, str(report)]
        done = subprocess.run(
            python_command("torch.distributed.run", *options), check=False, capture_output=True, text=True
        )
        if done.returncode:
            msg = f"the benchmark failed on {ranks} ranks: {done.stderr.strip()[-_END:]}"
            raise RuntimeError(msg)
        rows: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))
    yield from (BenchmarkRow(**row) for row in rows)

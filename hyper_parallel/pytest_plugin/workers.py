"""Processes of pytest-xdist: what they measured must not be lost with them.

The controller waits for a worker's tests without limit, then ten seconds for its process, and kills it. On a busy
machine that cost whole workers the coverage that they would have written at their exit, and only lowered a number.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from hyper_parallel.transport.processes import available, end_ranks, stay_on
from hyper_parallel.transport.rank_pool import register_rank

if TYPE_CHECKING:
    import pytest

__all__ = ["end_worker", "is_worker", "start_worker"]


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker, and another one has all reports."""
    return hasattr(config, "workerinput")


def start_worker(config: pytest.Config) -> None:
    """Write the worker down beside the ranks: a run in which it leaves no coverage is red.

    If it is asked for, and no CPU is left idle by it, the worker and its ranks keep to one CPU.
    """
    said: dict[str, Any] = config.workerinput  # type: ignore[attr-defined] # pytest-xdist's
    name: str = said["workerid"]
    register_rank(os.getpid(), "", f"pytest worker {name}")
    if config.getoption("hp_one_cpu") and said["workercount"] >= len(available()):
        stay_on(int(name.removeprefix("gw")))


def end_worker() -> None:
    """End the ranks, and save what was measured, while the controller still waits."""
    end_ranks()
    coverage: Any = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    if current is not None:
        current.stop()
        current.save()

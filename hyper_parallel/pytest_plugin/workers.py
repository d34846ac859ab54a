"""Keep the coverage of pytest-xdist's worker processes.

After the last test, the controller waits ten seconds for a worker's process and then kills it. On a busy machine,
workers were killed before they had written their coverage, which silently lowered the result.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from hyper_parallel.transport.processes import available, end_ranks, stay_on
from hyper_parallel.transport.simulated.rank_pool import register_rank

if TYPE_CHECKING:
    import pytest

__all__ = ["end_worker", "is_worker", "start_worker"]


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def start_worker(config: pytest.Config) -> None:
    """Register the worker like a rank, so that the coverage gate fails if it leaves no data.

    With ``--hp-one-cpu``, and as many workers as CPUs, the worker and its ranks are pinned to one CPU.
    """
    worker_input: dict[str, Any] = config.workerinput  # type: ignore[attr-defined] # pytest-xdist's
    name: str = worker_input["workerid"]
    register_rank(os.getpid(), "", f"pytest worker {name}")
    if config.getoption("hp_one_cpu") and worker_input["workercount"] >= len(available()):
        stay_on(int(name.removeprefix("gw")))


def end_worker() -> None:
    """End the ranks and save the coverage data while the controller still waits."""
    end_ranks()
    coverage: Any = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    if current is not None:
        current.stop()
        current.save()

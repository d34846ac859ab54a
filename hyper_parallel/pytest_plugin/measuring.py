"""Coverage of tests on ranks and in worker processes: sets contexts on ranks, and saves the data in time.

pytest-cov combines the data after the last test, and switches contexts only in pytest's process. After the last test,
the controller of pytest-xdist waits ten seconds for a worker's process and then kills it. On a busy machine, a worker
may need longer to write its coverage data; the coverage would then be too low, without an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from hyper_parallel.transport.measurement import in_test_context
from hyper_parallel.transport.processes import available, end_ranks, stay_on
from hyper_parallel.transport.simulated.rank_pool import register_rank

__all__ = ["RankContexts", "end_worker", "is_worker", "pytest_runtestloop", "start_worker"]


class RankContexts:
    """Passes the running test's context to its ranks, named as by ``--cov-context=test``: ``test_x.py::test_y|run``."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Set the context for worlds of fixtures."""
        with in_test_context(f"{item.nodeid}|setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Set the context for worlds of the test."""
        with in_test_context(f"{item.nodeid}|run"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Set the context for worlds of finalizers."""
        with in_test_context(f"{item.nodeid}|teardown"):
            return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """End the ranks before pytest-cov combines the data: some ranks write their coverage data only when they end."""
    try:
        return (yield)
    finally:
        end_ranks()


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def start_worker(config: pytest.Config) -> None:
    """Register the worker like a rank, so that the check of the coverage fails if the worker leaves no data.

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

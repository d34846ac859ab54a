"""Coverage of tests on ranks under pytest-cov: which test the lines of a rank belong to, and data in time.

pytest-cov combines the data when the last test has ended, and switches contexts in pytest's process only.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from hyper_parallel.transport.measurement import in_test_context
from hyper_parallel.transport.processes import end_ranks

__all__ = ["RankContexts", "pytest_runtestloop"]


class RankContexts:
    """Names the running test to its ranks as ``--cov-context=test`` names it: ``test_x.py::test_y|run``."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Worlds of fixtures."""
        with in_test_context(f"{item.nodeid}|setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Worlds of the test."""
        with in_test_context(f"{item.nodeid}|run"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Worlds of finalizers."""
        with in_test_context(f"{item.nodeid}|teardown"):
            return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """End the ranks inside pytest-cov's own wrapper: one that it did not start may write its data only now."""
    try:
        return (yield)
    finally:
        end_ranks()

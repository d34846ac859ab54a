from __future__ import annotations

import os
import sys

import pytest

from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE


@pytest.fixture
def interruptible():
    """The environment of a command that gets Ctrl-C; neither it nor its ranks are measured.

    An interrupt inside of coverage's tracer leaves the tracer's lock taken, and the process waits for it forever.
    """
    dropped = (LEDGER_VARIABLE, "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

"""Ranks that are killed, stopped or that raise in a collective: named, and the next world runs."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE


@pytest.fixture(autouse=True)
def _unrecorded(monkeypatch):
    """Ranks that start here leave no coverage data where they are killed, so the gate must not miss it."""
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)


def _sum(device, how):
    """Add a tensor over all ranks; rank 1 fails on the way."""
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    transport, platform = active_transport(), current_platform()
    if transport.rank == 1 and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    x = platform.to_device(platform.from_numpy(np.ones(3, "float32")), device)
    if transport.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if transport.rank == 1 and how == "raises":
        msg = "rank 1 has had enough"
        raise ArithmeticError(msg)
    return platform.tensor_to_numpy(transport.all_reduce(x, "sum", (0, 1, 2))).tolist()


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_fails_in_a_collective_is_named(on_ranks, suite_device, how):
    """The others wait in the collective and are ended; the error names rank 1, and another world runs at once."""
    with pytest.raises(RankFailedError, match="rank 1") as caught:
        on_ranks(_sum, 3, suite_device, how)
    assert set(caught.value.failures) == {1}
    assert on_ranks(_sum, 3, suite_device, "") == [[3.0] * 3] * 3


def test_a_rank_that_is_stopped_is_named(on_ranks, suite_device):
    """At the limit the report says that rank 1 is stopped and where the others wait, and another world runs."""
    limit = 2.0
    while True:
        with pytest.raises(RankFailedError, match="did not finish within") as caught:
            on_ranks(_sum, 3, suite_device, "stopped", seconds=limit)
        text = str(caught.value)
        if "all_reduce" in text:
            break
        limit *= 2  # the machine was too busy for the others to reach the collective
        assert limit < 300, text
    assert "rank 1: was running in\n(the process is stopped)" in text
    assert on_ranks(_sum, 3, suite_device, "") == [[3.0] * 3] * 3

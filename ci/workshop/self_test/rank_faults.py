"""What one of the ranks does instead of its part in a collective, to show that the harness reports it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np

from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.transport.base import Transport, active_transport

__all__ = [
    "FAULTY_RANK",
    "exit_without_report",
    "hang",
    "join_barrier",
    "kill_self",
    "raise_error",
    "run_rank_with_fault",
    "skip_collective",
    "sum_ones",
]

FAULTY_RANK = 1
"""The rank that a fault changes."""


def run_rank_with_fault(platform: str, fault: Callable[[Transport], None] | None) -> None:
    """Join a barrier and then a sum, except that the faulty rank runs ``fault`` instead of the sum."""
    transport = active_transport()
    assert transport is not None
    with use_platform(platform):
        join_barrier(transport)
        if fault is not None and transport.rank == FAULTY_RANK:
            fault(transport)
        else:
            sum_ones(transport)


def join_barrier(transport: Transport) -> None:
    """Join a barrier of all ranks."""
    transport.barrier(tuple(range(transport.world_size)))


def sum_ones(transport: Transport, size: int = 3, op: str = "sum", dtype: str = "float32") -> None:
    """Join an all_reduce of ones; as a fault, with another size, reduction or dtype than the other ranks."""
    x = current_platform().from_numpy(np.ones(size, dtype))
    transport.all_reduce(x, op, tuple(range(transport.world_size)))


def hang(transport: Transport) -> None:
    """Never join the collective."""
    while transport.rank == FAULTY_RANK:
        time.sleep(0.01)


def raise_error(transport: Transport) -> None:
    """Raise an ArithmeticError."""
    msg = f"injected on rank {transport.rank}"
    raise ArithmeticError(msg)


def exit_without_report(_transport: Transport) -> None:
    """End the process without a report."""
    os._exit(3)


def kill_self(_transport: Transport) -> None:
    """End the process by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)  # pragma: no cover - leaves no data


def skip_collective(_transport: Transport) -> None:
    """Return without joining the collective."""

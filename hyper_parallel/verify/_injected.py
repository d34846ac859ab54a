"""What the ranks of the self-test do; apart from the test, so that a rank imports little before it does it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np

from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.transport.base import Transport, active_transport

__all__ = ["CULPRIT", "hang", "join_barrier", "kill", "leave", "nothing", "on_rank", "reduce", "throw"]

CULPRIT = 1


def join_barrier(transport: Transport) -> None:
    """Wait for everybody."""
    transport.barrier(tuple(range(transport.world_size)))


def reduce(transport: Transport, size: int = 3, op: str = "sum", dtype: str = "float32") -> None:
    """Sum three numbers, or something else."""
    x = current_platform().from_numpy(np.ones(size, dtype))
    transport.all_reduce(x, op, tuple(range(transport.world_size)))


def hang(transport: Transport) -> None:
    """Never come."""
    while transport.rank == CULPRIT:
        time.sleep(0.01)


def throw(transport: Transport) -> None:
    """Raise."""
    msg = f"injected on rank {transport.rank}"
    raise ArithmeticError(msg)


def leave(_transport: Transport) -> None:
    """Leave without a word."""
    os._exit(3)


def kill(_transport: Transport) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)  # pragma: no cover - leaves no data


def nothing(_transport: Transport) -> None:
    """Return without the collective."""


def on_rank(platform: str, deed: Callable[[Transport], None] | None) -> None:
    """A barrier, and then a sum in which the culprit does its deed instead."""
    transport = active_transport()
    assert transport is not None
    with use_platform(platform):
        join_barrier(transport)
        if deed is not None and transport.rank == CULPRIT:
            deed(transport)
        else:
            reduce(transport)

"""One CPU for processes that work in turn.

Simulated ranks hand over to each other thousands of times a second, and so do the threads of MindSpore's pool, which
spin while they wait. On another CPU the next one has to be woken first: on two cores that took as long as everything
else together, and an operator of MindSpore three times as much processor time.
"""

from __future__ import annotations

import os
import sys

__all__ = ["available", "stay_on"]


def available() -> list[int]:
    """Numbers of the CPUs that this process may use; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def stay_on(seat: int) -> None:
    """Keep this thread, and the threads and processes that it starts from now on, on one CPU.

    Args:
        seat: which of them, counted on from the first again after the last. Of no effect where processes cannot be
            bound.
    """
    if sys.platform == "linux":
        allowed = available()
        os.sched_setaffinity(0, {allowed[seat % len(allowed)]})

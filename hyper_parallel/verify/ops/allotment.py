"""How much processor time each operator of a sweep gets, so that every one is visited and the whole is done in time.

What an operator must have (the first sizes of every sample) it takes, whatever that costs. What is left until the
sweep is to be done is shared among the tasks that wait, anew whenever one is handed out: a costly one leaves less to
those that follow, one that needs little leaves more, and the last letters of the alphabet get as much as the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

__all__ = ["Allotment"]


class Allotment:
    """Time that tasks share.

    Args:
        seconds: of wall time from now on.
        workers: tasks that run at the same time.
    """

    def __init__(self, seconds: float, workers: int) -> None:
        self._until, self._workers = time.monotonic() + seconds, workers

    def given(self, task: dict[str, Any], waiting: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """``task`` with its part of the time that is left; one that shares nothing is as it was.

        Args:
            task: is handed out now.
            waiting: come after it.
        """
        mine = _weight(task)
        if not mine:
            return task
        left = max(self._until - time.monotonic(), 0.0) * self._workers
        part = left * mine / (mine + sum(map(_weight, waiting))) / len(task["ops"])
        effort = task["effort"]
        return {**task, "effort": {**effort, "seconds": min(part, effort["seconds"])}}


def _weight(task: dict[str, Any]) -> float:
    """As many parts as it has operators."""
    return float(task["share"] * len(task["ops"]))

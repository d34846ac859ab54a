"""A function that draws the same random numbers of DTensors whenever it runs again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["replayed"]


def replayed(
    fn: Callable[..., Any],
    get_state: Callable[[], Any],
    again_from: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """``fn``, whose first run is as it is, and whose later ones start from the state that the first one started from.

    Args:
        fn: what is checkpointed.
        get_state: the state of the generators that the framework does not know.
        again_from: a context in which the generators start from a state, and after which they are as before.
    """
    start, lock, runs = get_state(), threading.Lock(), [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        with lock:
            runs[0] += 1
            first = runs[0] == 1
        if first:
            return fn(*args, **kwargs)
        with again_from(start):
            return fn(*args, **kwargs)

    return run

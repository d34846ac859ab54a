"""Functions that draw the same random numbers of DTensors whenever they run again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

__all__ = ["replayed", "rerun", "rerunning"]


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
    again, lock, runs = rerun(fn, get_state, again_from), threading.Lock(), [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        with lock:
            runs[0] += 1
            first = runs[0] == 1
        return fn(*args, **kwargs) if first else again(*args, **kwargs)

    return run


def rerun(
    fn: Callable[..., Any],
    get_state: Callable[[], Any],
    again_from: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """``fn`` as every run starts from the state of now; for what runs again only. Arguments as :func:`replayed`."""
    start = get_state()

    def run(*args: Any, **kwargs: Any) -> Any:
        with again_from(start):
            return fn(*args, **kwargs)

    return run


def rerunning(
    init: Callable[..., None],
    get_state: Callable[[], Any],
    again_from: Callable[[Any], AbstractContextManager[Any]],
) -> Callable[..., None]:
    """``init`` of a framework's object that is made before forward runs, and given what will run again.

    Args:
        init: its constructor; the first argument is what runs again.
        get_state: as for :func:`replayed`.
        again_from: likewise.
    """

    @wraps(init)
    def made(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        init(self, rerun(function, get_state, again_from), *args, **kwargs)

    return made

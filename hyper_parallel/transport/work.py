"""The handle of an asynchronous collective, which is waited for exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hyper_parallel.errors import HandleError

__all__ = ["Work"]


class Work:
    """A collective in flight.

    Args:
        what: name of the collective, for messages.
        finish: waits for the collective and returns its result; called once.
        output: the tensor that will hold the result, if it exists already; else None.
    """

    def __init__(self, what: str, finish: Callable[[], Any], output: Any = None) -> None:
        self.what = what
        self.output = output
        self._finish: Callable[[], Any] | None = finish
        self._lock = threading.Lock()

    @property
    def waited(self) -> bool:
        """Whether the collective was waited for."""
        return self._finish is None

    def wait(self) -> Any:
        """Wait until the collective is complete and return its result.

        Raises:
            HandleError: the collective was waited for before.
        """
        with self._lock:
            finish, self._finish = self._finish, None
        if finish is None:
            msg = f"{self.what}: this handle was waited for before; wait once and keep the result"
            raise HandleError(msg)
        return finish()

    def then(self, follow: Callable[[Any], Any], output: Any = None) -> Work:
        """Return a handle of the same collective whose result is ``follow(self.wait())``."""
        return Work(self.what, lambda: follow(self.wait()), output)

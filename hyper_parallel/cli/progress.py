"""One line on stderr that says what runs; nothing where stderr is not a terminal."""

from __future__ import annotations

import sys

__all__ = ["Progress"]

_WIDTH = 24


class Progress:
    """Counts finished parts.

    Args:
        total: number of parts.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._shown = sys.stderr.isatty()
        self._running = False

    def start(self, what: str) -> None:
        """Show that ``what`` runs now."""
        if self._shown:
            full = _WIDTH * self.done // max(self.total, 1)
            bar = "#" * full + "." * (_WIDTH - full)
            print(f"\r\x1b[K[{bar}] {self.done}/{self.total} {what}", end="", file=sys.stderr, flush=True)

    def next(self, what: str) -> None:
        """Show that ``what`` runs now, and that what was shown before is done."""
        self.done += self._running
        self._running = True
        self.start(what)

    def finish(self) -> None:
        """Count the part that ran, and clear the line for what is printed."""
        self.done += 1
        self.clear()

    def clear(self) -> None:
        """Clear the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

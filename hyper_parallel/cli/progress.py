"""Progress on stderr: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich import progress as rich_progress

__all__ = ["FIRST_SECONDS", "NEXT_SECONDS", "Progress"]

FIRST_SECONDS = 2.0
"""Seconds before the first progress line without a terminal."""

NEXT_SECONDS = 10.0
"""Minimum number of seconds between two progress lines without a terminal."""

_LINES = "HP_PROGRESS_LINES"  # 0 writes none
_MINUTE = 60


class Progress:
    """Counts finished parts, and shows them with the running part and the remaining time.

    If stderr is not a terminal, a line is written when a part starts. The first line is written after two seconds, and
    further lines at least ten seconds apart; none is written if the variable ``HP_PROGRESS_LINES`` is 0. On a terminal,
    the methods redraw the bar. Only inside ``ticking`` and ``running`` does a thread redraw it; commands that fork this
    process do not use them.

    Args:
        total: number of parts.
        clock: returns the time in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done, self.clock = total, 0, clock
        self._running = False
        self._part: str | None = None
        self._lock = threading.Lock()
        self._shown: tuple[rich_progress.Progress, rich_progress.TaskID] | None = None
        self._is_terminal = sys.stderr.isatty()
        self._started = clock()
        self._due = math.inf if os.environ.get(_LINES) == "0" else self._started + FIRST_SECONDS

    def start(self, part: str) -> None:
        """Show that ``part`` is running."""
        with self._lock:
            self._part = part
            self._show(part)

    def _show(self, part: str) -> None:
        if not self._is_terminal:
            self._line(part)
            return
        if self._shown is None:
            bar = _bar()
            self._shown = bar, bar.add_task(part, total=self.total)
            atexit.register(self.clear)  # a command that ends early must not leave the terminal without a cursor
        bar, task = self._shown
        bar.start()
        bar.update(task, completed=self.done, total=self.total, description=part, refresh=True)

    def next(self, part: str) -> None:
        """Show that ``part`` is running, and count the previous part as finished."""
        self.done += self._running
        self._running = True
        if self.total:
            self.total = max(self.total, self.done + 1)  # more parts than announced
        self.start(part)

    def finish(self) -> None:
        """Count the running part as finished, and clear the line for other output."""
        self.done += 1
        self.clear()

    def clear(self) -> None:
        """Clear the line."""
        with self._lock:
            self._part = None
            if self._shown is not None:
                bar, task = self._shown
                bar.update(task, completed=self.done)
                bar.stop()

    @contextlib.contextmanager
    def ticking(self, seconds: float = 1.0) -> Iterator[None]:
        """Redraw the running part at this interval in seconds until the block ends, for long parts."""
        stop = threading.Event()
        thread = threading.Thread(target=self._show_again, args=(stop, seconds), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextlib.contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Show that ``part`` is running, redrawn every second, and count it as finished if the block does not raise."""
        with self.ticking():
            self.start(part)
            yield
            self.finish()

    def _show_again(self, stop: threading.Event, seconds: float) -> None:
        while not stop.wait(seconds):
            with self._lock:
                if self._part is not None:
                    self._show(self._part)

    def _line(self, part: str) -> None:
        """Write a line if one is due."""
        now = self.clock()
        if now < self._due:
            return
        self._due = now + NEXT_SECONDS
        count = f"{self.done} of {self.total}" if self.total else str(self.done)
        print(f"{count} done{self._left(now)}: {part}", file=sys.stderr, flush=True)

    def _left(self, now: float) -> str:
        """Return the remaining time at the pace so far; before the first part has finished, return the elapsed time."""
        if self.done == 0:
            return f" after {round(now - self._started)} s"
        if not 0 < self.done <= self.total:
            return ""
        seconds = round((now - self._started) / self.done * (self.total - self.done))
        return f", about {seconds} s left" if seconds < _MINUTE else f", about {round(seconds / _MINUTE)} min left"


def _bar() -> rich_progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False,
                    redirect_stderr=False)  # fmt: skip

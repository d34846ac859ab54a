"""A progress bar on stderr while a command works; nothing where stderr is not a terminal."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress as rich_progress

__all__ = ["Progress"]


class Progress:
    """Counts finished parts and shows them, the running part and the time left.

    The bar is redrawn by the calls below and by no thread: commands fork rank processes.

    Args:
        total: number of parts.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._running = False
        self._shown: tuple[rich_progress.Progress, rich_progress.TaskID] | None = None
        self._is_terminal = sys.stderr.isatty()

    def start(self, part: str) -> None:
        """Show that ``part`` is running."""
        if not self._is_terminal:
            return
        if self._shown is None:
            bar = _bar()
            self._shown = bar, bar.add_task(part, total=self.total)
            atexit.register(self.clear)  # a command that ends early must not leave the terminal without a cursor
        bar, task = self._shown
        bar.start()
        bar.update(task, completed=self.done, description=part, refresh=True)

    def next(self, part: str) -> None:
        """Show that ``part`` is running, and count the previous part as finished."""
        self.done += self._running
        self._running = True
        self.start(part)

    def finish(self) -> None:
        """Count the running part as finished, and clear the line for what is printed."""
        self.done += 1
        self.clear()

    def clear(self) -> None:
        """Clear the line."""
        if self._shown is not None:
            bar, task = self._shown
            bar.update(task, completed=self.done)
            bar.stop()


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

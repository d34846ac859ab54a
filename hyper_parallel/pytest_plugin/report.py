"""The report of a failed ranked test: the failing rank's traceback first, then where the other ranks were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from _pytest._code.code import ReprFileLocation, TerminalRepr

if TYPE_CHECKING:
    from _pytest._io import TerminalWriter

__all__ = ["RanksRepr", "rank_of_failure"]


class RanksRepr(TerminalRepr):
    """The text of a failed world, and the line for pytest's summary.

    Args:
        text: the whole report.
        path, line: where the test is.
        failure: the error.
    """

    def __init__(self, text: str, path: str, line: int, failure: BaseException) -> None:
        self.text = text
        self.reprcrash = ReprFileLocation(path, line, _headline(failure))

    def __str__(self) -> str:
        return self.text

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the text, error lines in red."""
        for line in self.text.splitlines():
            tw.line(line, red=line.startswith("E ") or "Error:" in line)
        self.reprcrash.toterminal(tw)


def _headline(failure: BaseException) -> str:
    first = rank_of_failure(failure)
    cause = failure.__cause__
    if first is None or cause is None:
        return str(failure).splitlines()[0]
    text = str(cause).splitlines() or [""]
    name = type(cause).__name__
    return f"rank {first}: {text[0]}" if name == "RankFailedError" else f"rank {first}: {name}: {text[0]}"


def rank_of_failure(failure: BaseException) -> int | None:
    """Return the rank that failed first, or None if unknown."""
    failures = getattr(failure, "failures", {})
    return next(iter(failures), None)

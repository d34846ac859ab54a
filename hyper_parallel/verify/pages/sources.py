"""Call sites of a page: each is a link to the surrounding lines of the user's script."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

from markupsafe import Markup

from hyper_parallel.verify.pages.tables import Cell

__all__ = ["CallSites"]

_SITE = re.compile(r"(?P<file>/[^\n:]+?\.py|[^\s:]+\.py):(?P<line>\d+)")
_AROUND = 3
"""Number of lines shown before and after a call."""

_MOST = 20
"""Maximum number of call sites whose lines are shown; the others are plain text."""

_LONGEST = 160
"""Maximum number of characters shown of a line."""


class CallSites:
    """Collects the call sites that occur in a page.

    Lines are read when the page is written. A site stays plain text if its file is not a Python file, no longer exists,
    or has fewer lines.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], Markup | None] = {}

    def cell(self, text: str) -> Cell:
        """Return a cell of a table with a link to the lines around a call.

        Args:
            text: ``file.py:12``, optionally followed by more words; empty if unknown.
        """
        return Cell(self.linked(text), key=text)

    def linked(self, text: str) -> Markup:
        """Return a text in which the first ``file.py:12`` is a link to its lines."""
        match = _SITE.search(text)
        if match is None or self._known(match["file"], int(match["line"])) is None:
            return Markup("{}").format(text)
        address = _address(match["file"], int(match["line"]))
        return Markup('{}<a href="#{}">{}</a>{}').format(text[: match.start()], address, match[0], text[match.end() :])

    def shown(self) -> list[tuple[str, str, Markup]]:
        """Return id, site and lines of every call site with lines, in page order."""
        return [
            (_address(file, line), f"{file}:{line}", lines)
            for (file, line), lines in self._lines.items()
            if lines is not None
        ]

    def _known(self, file: str, line: int) -> Markup | None:
        site = (file, line)
        if site not in self._lines:
            shown = sum(lines is not None for lines in self._lines.values())
            self._lines[site] = _around(*site) if shown < _MOST else None
        return self._lines[site]


def _address(file: str, line: int) -> str:
    return "site-" + re.sub(r"[^A-Za-z0-9_.]+", "-", f"{Path(file).name}-{line}")


def _around(file: str, line: int) -> Markup | None:
    """Return a line, marked, with the lines around it; None if the file does not have it."""
    if not Path(file).is_file():
        return None
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return None
    shown = []
    for number in range(max(1, line - _AROUND), min(len(lines), line + _AROUND) + 1):
        text = f"{number:5}  {lines[number - 1].rstrip()[:_LONGEST]}"
        shown.append(Markup("<mark>{}  ← here</mark>").format(text) if number == line else Markup("{}").format(text))
    return Markup("\n").join(shown)

"""Text for a terminal: control characters escaped, verdicts in colour where it shows them."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from hyper_parallel._text import printable

__all__ = ["coloured", "wants_colour"]

_RED, _GREEN, _END = "\x1b[1;31m", "\x1b[32m", "\x1b[0m"
_BAD = re.compile(r"\b(FAILED|DIVERGED|ENDED|NOT VERIFIED|WRONG|MISSED|worse|error)\b")
_GOOD = re.compile(r"\b(equal|held|as expected|better)\b")


def wants_colour(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that shows colours, and ``NO_COLOR`` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, stream: TextIO | None = None) -> str:
    """Return text with the first verdict of each line in colour, if the stream shows it.

    Control characters, which names of a user's modules may have, are escaped.

    Args:
        text: of a report or an error.
        stream: where it is printed; stdout by default.
    """
    text = printable(text, keep="\n\t")
    if not wants_colour(sys.stdout if stream is None else stream):
        return text
    return "\n".join(map(_coloured_line, text.split("\n")))


def _coloured_line(line: str) -> str:
    if _BAD.search(line):
        return _BAD.sub(lambda word: f"{_RED}{word[0]}{_END}", line, count=1)
    return _GOOD.sub(lambda word: f"{_GREEN}{word[0]}{_END}", line, count=1)

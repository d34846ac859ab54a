"""Adds a table of contents, and an anchor for every heading and every row, to a rendered document."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape

from markupsafe import Markup

__all__ = ["linked", "text_of"]

_MARKS = re.compile(
    r"(?P<details><details[^>]*>)|(?P<end></details>)"
    r"|<h(?P<level>[23])>(?P<heading>.*?)</h(?P=level)>"
    r'|<tr><th scope="row"(?P<attributes>[^>]*)>(?P<head>.*?)</th>',
    re.DOTALL,
)
_CONTENTS = "<!--contents-->"
_TAGS = re.compile(r"<[^>]*>")
_ENTITIES = re.compile(r"&[a-z]+;|&#\d+;")
_LONGEST = 48  # characters of an anchor
_FEW = 3
"""Minimum number of headings for a table of contents."""

_MANY = 40
"""Maximum number of subheadings in the table of contents; with more, it lists only the sections."""


def linked(document: str) -> str:
    """Return a page with contents after its title, an id for every heading, and a permalink in every row.

    Headings in folded text are not in the table of contents. An anchor is made from the text of the heading, or of the
    row's first cell, so that it stays the same when the page is written again or the table is sorted.

    Args:
        document: a page whose text is escaped, so that all tags come from the template.
    """
    addresses = _Addresses()
    headings: list[tuple[int, str, str]] = []
    depth = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal depth
        if match["details"] or match["end"]:
            depth += 1 if match["details"] else -1
            return match[0]
        if match["level"]:
            level, text = int(match["level"]), match["heading"]
            address = addresses.new("part", text)
            if not depth:
                headings.append((level, address, text_of(text)))
            return f'<h{level} id="{address}">{text}</h{level}>'
        address = addresses.new("row", match["head"])
        link = f'<a class="permalink" href="#{address}" aria-label="link to this row"></a>'
        return f'<tr id="{address}"><th scope="row"{match["attributes"]}>{match["head"]}{link}</th>'

    return _MARKS.sub(replaced, document).replace(_CONTENTS, _contents(headings), 1)


def text_of(element: str) -> str:
    """Return the visible text of an element, without tags."""
    return unescape(_TAGS.sub("", element))


def _contents(headings: list[tuple[int, str, str]]) -> str:
    """Return a list of links to sections, and to their subsections unless there are too many."""
    if len(headings) > _MANY:
        headings = [heading for heading in headings if heading[0] == min(level for level, _, _ in headings)]
    if len(headings) < _FEW:
        return ""
    items = [
        Markup('<li class="level{}"><a href="#{}">{}</a></li>').format(level, address, text)
        for level, address, text in headings
    ]
    return f'<nav class="contents" aria-label="contents"><ul>{"".join(items)}</ul></nav>'


class _Addresses:
    """Anchors that are unique in a page."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def new(self, kind: str, text: str) -> str:
        """Return the anchor of an element with this text; the anchor of a second element with this text ends in 2."""
        words = re.sub(r"[^A-Za-z0-9_.]+", "-", _ENTITIES.sub(" ", _TAGS.sub(" ", text)))
        words = words.strip("-")[:_LONGEST].rstrip("-")
        base = f"{kind}-{words or 'none'}"
        self._seen[base] += 1
        count = self._seen[base]
        return base if count == 1 else f"{base}--{count}"

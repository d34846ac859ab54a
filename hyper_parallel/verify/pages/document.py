"""What every document gets after its templates: contents, and an address for every heading and every row."""

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
_LONGEST = 48  # of an address
_FEW = 3
"""Headings from which a page has contents."""

_MANY = 40
"""Headings of parts that contents list; with more, they list the sections alone."""


def linked(document: str) -> str:
    """Return a page with contents after its title, an id for every heading, and a permalink in every row.

    Headings in folded text are not in the contents. An address is made of the heading's, or of the row's first cell's,
    text, so that it is the same when the page is written again and when the table is sorted.

    Args:
        document: a page whose text is escaped, so that each tag in it is the template's.
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
    """Return what a reader sees of an element: its text, without the tags in it."""
    return unescape(_TAGS.sub("", element))


def _contents(headings: list[tuple[int, str, str]]) -> str:
    """Return a list of links: to sections, and to the parts of each where there are not too many."""
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
    """Ids that are unique in a page."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def new(self, kind: str, text: str) -> str:
        """Return the id of an element with this text; the second of the same text ends in 2."""
        words = re.sub(r"[^A-Za-z0-9_.]+", "-", _ENTITIES.sub(" ", _TAGS.sub(" ", text)))
        words = words.strip("-")[:_LONGEST].rstrip("-")
        base = f"{kind}-{words or 'none'}"
        self._seen[base] += 1
        count = self._seen[base]
        return base if count == 1 else f"{base}--{count}"

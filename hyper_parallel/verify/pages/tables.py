"""Tables: readable as they are; with the page's script they sort by every column and filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hyper_parallel._text import byte_words
from hyper_parallel.verify.pages.render import render

__all__ = ["Cell", "Column", "Text", "Value", "code", "number", "size", "size_words", "table"]

_KINDS = ("", "good", "bad", "warn", "quiet")

Text = str | int | float | Markup


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its head.
        number: whether it has numbers, which are right-aligned.
        choice: whether the table may be filtered by one of its values.
        hint: what the head means, shown when it is pointed at.
        words: whether it has sentences, which get several words on a line on a phone as well.
    """

    name: str
    number: bool = False
    choice: bool = False
    hint: str = ""
    words: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell that is more than its text.

    Attributes:
        shown: text, or markup.
        key: what sorting and choosing go by; the text by default. An empty key sorts to the end.
        kind: ``good``, ``bad``, ``warn`` or ``quiet``; a colour that only repeats what the text says.
    """

    shown: Text
    key: str | float | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        """Reject a kind that the style does not know."""
        if self.kind not in _KINDS:
            msg = f"Cell: kind {self.kind!r} is none of {', '.join(map(repr, _KINDS))}"
            raise ValueError(msg)


Value = Cell | Text  # of a row


def code(name: str) -> Cell:
    """Return a cell with ``name`` in the font of code."""
    return Cell(Markup("<code>{}</code>").format(name), key=name)


def number(value: Any) -> Cell:
    """Return a cell with a number, four digits of a float; None is absent."""
    if value is None:
        return Cell("absent")
    return Cell(f"{value:.4g}" if isinstance(value, float) else f"{value:,}", key=value)


def size(count: int) -> Cell:
    """Return a cell with a number of bytes in its unit; the exact number is shown when it is pointed at."""
    return Cell(Markup('<span title="{:,} bytes">{}</span>').format(count, size_words(count)), key=count)


def size_words(count: int) -> str:
    """Return a number of bytes in its unit, on one line."""
    return byte_words(count).replace(" ", "\N{NO-BREAK SPACE}")


def table(
    caption: Text,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[Value]],
    *,
    sort: bool = True,
    search: bool = False,
    tall: bool = False,
    empty: str = "nothing",
) -> Markup:
    """Return a table; the first cell of a row is the row's head.

    Args:
        caption: what the table shows, in a sentence.
        columns: heads; a string is a column of text.
        rows: one value per column each; text is escaped.
        sort: whether a click on a head sorts.
        search: whether a search field stands above it, and a choice for every column that has one.
        tall: whether it scrolls under its heads, for many rows.
        empty: shown in place of no rows.

    Raises:
        ValueError: a row has another number of values than there are columns.
    """
    for row in rows:
        if len(row) != len(columns):
            msg = f"table {str(caption)!r}: a row has {len(row)} values for {len(columns)} columns"
            raise ValueError(msg)
    return render(
        "table.html",
        caption=caption,
        label="table" if isinstance(caption, Markup) else caption,
        columns=[Column(column) if isinstance(column, str) else column for column in columns],
        rows=[[value if isinstance(value, Cell) else Cell(value) for value in row] for row in rows],
        sort=sort,
        search=search,
        tall=tall,
        empty=empty,
    )

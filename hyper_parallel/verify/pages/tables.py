"""Tables, readable without scripts; the page's script adds sorting by every column and filters."""

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
        name: heading of the column.
        number: whether the column has numbers, which are right-aligned.
        choice: whether the table can be filtered by one of the column's values.
        hint: explanation of the heading, shown on hover.
        words: whether the column has sentences; it is then wide enough for several words per line even on a phone.
    """

    name: str
    number: bool = False
    choice: bool = False
    hint: str = ""
    words: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell with markup, a sort key or a colour.

    Attributes:
        shown: text, or markup.
        key: key for sorting and filtering; the text by default. An empty key sorts to the end.
        kind: ``good``, ``bad``, ``warn`` or ``quiet``; a colour that only repeats the meaning of the text.
    """

    shown: Text
    key: str | float | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        """Reject a kind that the style does not define."""
        if self.kind not in _KINDS:
            msg = f"Cell: kind {self.kind!r} is none of {', '.join(map(repr, _KINDS))}"
            raise ValueError(msg)


Value = Cell | Text  # item of a row


def code(name: str) -> Cell:
    """Return a cell with ``name`` in a monospace font."""
    return Cell(Markup("<code>{}</code>").format(name), key=name)


def number(value: Any) -> Cell:
    """Return a cell with a number, floats with four digits; None is shown as absent."""
    if value is None:
        return Cell("absent")
    return Cell(f"{value:.4g}" if isinstance(value, float) else f"{value:,}", key=value)


def size(count: int) -> Cell:
    """Return a cell with a number of bytes in a suitable unit; the exact number is shown on hover."""
    return Cell(Markup('<span title="{:,} bytes">{}</span>').format(count, size_words(count)), key=count)


def size_words(count: int) -> str:
    """Return a number of bytes in a suitable unit, without line breaks."""
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
    """Return a table; the first cell of a row is the row's heading.

    Args:
        caption: description of the table, in a sentence.
        columns: columns; a string is a text column with this heading.
        rows: rows with one value per column; text is escaped.
        sort: whether a click on a heading sorts.
        search: whether the table has a search field, and a filter for every column with ``choice``.
        tall: whether the rows scroll under fixed headings, for long tables.
        empty: text shown if there are no rows.

    Raises:
        ValueError: the number of values in a row differs from the number of columns.
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

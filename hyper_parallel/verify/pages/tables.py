"""Tables: readable as they are, and with the page's script sortable by every column and filterable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.verify.pages.markup import Html, Text, escape

__all__ = ["Cell", "Column", "Value", "table"]

_KINDS = ("", "good", "bad", "warn", "quiet")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its head.
        number: numbers, to the right.
        choice: may be filtered by one of its values.
        hint: what the head means, shown when it is pointed at.
    """

    name: str
    number: bool = False
    choice: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell that is more than its text.

    Attributes:
        shown: text, or markup.
        key: what sorting and choosing go by; the text by default. Empty: nothing, sorted to the end.
        kind: ``good``, ``bad``, ``warn`` or ``quiet``; never the only bearer of a meaning.
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


def table(
    caption: Text,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[Value]],
    *,
    sort: bool = True,
    search: bool = False,
    tall: bool = False,
    empty: str = "nothing",
) -> Html:
    """A table; the first cell of a row is the row's head.

    Args:
        caption: what the table shows, in a sentence.
        columns: heads; a string is a column of text.
        rows: one value per column each; text is escaped, numbers of a number column are right-aligned.
        sort: by a click on a head.
        search: a search field above it, and a choice for every column that has one.
        tall: scrolls under its heads, for many rows.
        empty: shown in place of no rows.

    Raises:
        ValueError: a row has another number of values than there are columns.
    """
    heads = [Column(one) if isinstance(one, str) else one for one in columns]
    for row in rows:
        if len(row) != len(heads):
            msg = f"table {escape(caption)!r}: a row has {len(row)} values for {len(heads)} columns"
            raise ValueError(msg)
    marks = f"{' data-sort' * (sort and bool(rows))}{' data-filter' * (search and bool(rows))}"
    body = "\n".join(_row(heads, row) for row in rows)
    body = body or f'<tr><td colspan="{len(heads)}" class="quiet">{escape(empty)}</td></tr>'
    label = escape(caption) if not isinstance(caption, Html) else "table"
    return Html(
        # Can be reached with the keyboard, for what does not fit is scrolled.
        f'<div class="scroll{" tall" * tall}" role="region" aria-label="{label}" tabindex="0"><table{marks}>\n'
        f"<caption>{escape(caption)}</caption>\n"
        f"<thead><tr>{''.join(map(_head, heads))}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _head(column: Column) -> str:
    number = ' class="number"' if column.number else ""
    choice = f' data-choice="{escape(column.name)}"' if column.choice else ""
    hint = f' title="{escape(column.hint)}"' if column.hint else ""
    return f'<th scope="col"{number}{choice}{hint}>{escape(column.name)}</th>'


def _row(heads: Sequence[Column], row: Sequence[Value]) -> str:
    cells = [value if isinstance(value, Cell) else Cell(value) for value in row]
    parts = [_cell(heads[0], cells[0], "th", ' scope="row"')]
    parts += [_cell(head, cell, "td") for head, cell in zip(heads[1:], cells[1:], strict=True)]
    return f"<tr>{''.join(parts)}</tr>"


def _cell(column: Column, cell: Cell, tag: str, extra: str = "") -> str:
    names = " ".join(filter(None, ("number" if column.number else "", cell.kind)))
    style = f' class="{names}"' if names else ""
    key = "" if cell.key is None else f' data-key="{escape(cell.key)}"'
    return f"<{tag}{extra}{style}{key}>{escape(cell.shown)}</{tag}>"

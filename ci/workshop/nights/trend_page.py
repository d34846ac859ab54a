"""The page of nightly runs: every value over the nights, the last night next to the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.verify.pages.charts import sparkline
from hyper_parallel.verify.pages.tables import Cell, Column, Value, number, table
from workshop.pages import render

if TYPE_CHECKING:
    from markupsafe import Markup

    from workshop.nights.history import History

__all__ = ["trend_page"]

_KINDS = {"worse": "bad", "better": "good", "other": "", "equal": ""}
_TALL = 20


def trend_page(history: History, night: str = "") -> str:
    """Return a document: what changed since the night before, all values over the nights, what was skipped.

    Args:
        history: the nights.
        night: address of the page of the last night, relative to this one; empty if there is none.
    """
    return render(
        "trend.html",
        title="Nights",
        footer="Written by python ci/workshop trend HISTORY --html FILE",
        good=not history.worse,
        verdict=history.summary(),
        night=night,
        facts={name: str(text) for name, text in history.last.header.items() if name != "versions"},
        versions={str(name): str(version) for name, version in dict(history.last.header.get("versions", {})).items()},
        values=_values(history),
        skipped=_skipped(history),
        nights=_nights(history),
    )


def _values(history: History) -> Markup:
    changes = {change.what: change for change in history.changes}
    names = list(dict.fromkeys([*changes, *history.last.values]))
    rows: list[list[Value]] = []
    for name in names:
        series = history.series(name)
        change = changes.get(name)
        before = series[-2] if len(series) > 1 else None
        verdict = change.verdict if change else "equal"
        rows.append([name, sparkline(name, series), number(before), number(series[-1]),
                     Cell(verdict, kind=_KINDS[verdict])])  # fmt: skip
    heads: list[Column | str] = [
        "value", "over the nights", Column("night before", number=True), Column("last night", number=True),
        Column("verdict", choice=True),
    ]  # fmt: skip
    caption = "Every value, what got worse first; equal includes times within the noise"
    return table(caption, heads, rows, search=True, tall=len(rows) > _TALL)


def _skipped(history: History) -> Markup:
    rows: list[list[Value]] = [
        [suite, count, reason] for suite, reasons in history.last.skipped.items() for reason, count in reasons.items()
    ]
    heads: list[Column | str] = [Column("suite", choice=True), Column("tests", number=True), "reason"]
    return table("Tests that were skipped in the last night, and why", heads, rows, tall=len(rows) > _TALL,
                 empty="no test was skipped")  # fmt: skip


def _nights(history: History) -> Markup:
    last = history.last.header.get("command", "")
    heads: list[Column | str] = ["date", "revision", Column("values", number=True), "command"]
    rows: list[list[Value]] = []
    for night in reversed(history.nights):
        command = str(night.header.get("command", ""))
        same = bool(rows) and command == last
        rows.append([*(str(night.header.get(name, "")) for name in ("date", "revision")), len(night.values),
                     Cell("as in the last night", kind="quiet") if same else command])  # fmt: skip
    return table("Every night, the newest first", heads, rows, tall=len(rows) > _TALL)

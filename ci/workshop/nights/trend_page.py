"""The page of nightly runs: every value over the nights, the last night next to the one before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyper_parallel.verify.pages import svg
from hyper_parallel.verify.pages.charts import polyline
from hyper_parallel.verify.pages.tables import Cell, Column, Value, number, table
from workshop.pages import render

if TYPE_CHECKING:
    from markupsafe import Markup

    from workshop.nights.history import History

__all__ = ["sparkline", "trend_page"]

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


def sparkline(name: str, values: Sequence[float | None]) -> Markup:
    """Return a small curve for a cell of a table, with its range below; a gap where a value is None or not finite.

    The last value is a dot, and each shows its number when it is pointed at.

    Args:
        name: of the value, for screen readers.
        values: the oldest first.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    parts: list[Markup] = []
    hints: list[Markup] = []
    run: list[tuple[float, float]] = []
    strip = 112 / max(len(values) - 1, 1)
    for step, value in enumerate([*values, None]):
        if value is not None and math.isfinite(value):
            share = (value - low) / (high - low) if high > low else 0.5
            run.append((4 + strip * step, 20 - 16 * share))
            hints.append(svg.rect(run[-1][0] - strip / 2, 0, strip, 24, style="fill:transparent",
                                  hint=f"night {step + 1} of {len(values)}: {value:.4g}"))  # fmt: skip
            continue
        if len(run) > 1:
            parts.append(polyline(run, f"stroke:{svg.colour('one')};stroke-width:2"))
        if len(run) == 1 or (run and step == len(values)):
            parts.append(svg.circle(*run[-1], 2.5, "one"))
        run = []
    text = f"from {low:.4g} to {high:.4g} in {len(finite)} of {len(values)} nights" if finite else "no value"
    shown = f"{low:.4g} to {high:.4g}" if high > low else f"{low:.4g}" if finite else "no value"
    parts.append(svg.text(0, 37, shown, size=11, fill="quiet"))
    return svg.picture(120, 40, f"{name}: {text}", "", [*parts, *hints])


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

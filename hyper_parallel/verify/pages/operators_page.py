"""The operator matrix: what was verified of every operator on every framework, and what was not and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.verify.pages.document import page
from hyper_parallel.verify.pages.markup import Html, escape
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table
from hyper_parallel.verify.report_files import other_version, read_json

__all__ = ["operators_page", "read_report"]

_INTRODUCTION = (
    "<p>Every row is an operator on a framework. A number counts checks: one sample, one choice of sizes, one "
    "placement of every operand, one mesh, compared with the plain operator. <em>n/a</em>: no placement of this "
    'operator can show it. <span class="bad">none</span>: some could, and none was tried.</p>'
)
_LONG = 60
_HINTS = {
    "forward": "outputs compared",
    "backward": "gradients of every input compared",
    "uneven": "pieces of unequal sizes, empty ones too",
    "several axes": "on a mesh of two or three axes",
    "partial": "with a pending reduction",
}
_KINDS = {"ok": "good", "wrong": "bad", "crash": "bad", "unexercised": "bad", "absent": "quiet", "exempt": "warn"}


def read_report(path: Path) -> dict[str, Any]:
    """A report of ``verify ops --report FILE.json``.

    Raises:
        ValueError: it cannot be read, or another version wrote it.
    """
    command = f"hyper-parallel verify ops --report {path.name}"
    report = read_json(path, ("columns", "operators"), command)
    if any("coverage" not in one for one in report["operators"]):
        raise ValueError(other_version(path, ["coverage"], command))
    return report


def operators_page(reports: Sequence[dict[str, Any]]) -> str:
    """A document over the reports of some frameworks.

    Args:
        reports: documents of ``verify ops --json``, of one framework or several each.
    """
    columns = list(dict.fromkeys(name for report in reports for name in report["columns"]))
    operators = [one for report in reports for one in report["operators"]]
    parts = [
        _INTRODUCTION,
        str(_frameworks(reports, columns)),
        "<h2>Operators</h2>",
        str(_matrix(operators, columns)),
    ]
    return page("Operators", "\n".join(parts), footer="Written from the reports of hyper-parallel verify ops")


def _frameworks(reports: Sequence[dict[str, Any]], columns: Sequence[str]) -> Html:
    heads: list[Column | str] = [
        "framework", "sweep", "verdict", Column("operators", number=True), Column("checks", number=True),
        *(Column(name, number=True, hint="operators checked, of those to which it applies") for name in columns),
        "outcomes",
    ]  # fmt: skip
    rows = [
        _framework(name, report, columns)
        for report in reports
        for name in dict.fromkeys(one["platform"] for one in report["operators"])
    ]
    text = "What was verified per framework: operators checked, of those to which the column applies"
    return table(text, heads, rows, empty="no operator was checked")


def _framework(name: str, report: dict[str, Any], columns: Sequence[str]) -> list[Value]:
    mine = [one for one in report["operators"] if one["platform"] == name]
    outcomes = Counter(one["outcome"] for one in mine)
    said = "held" if report["ok"] else "INTERRUPTED" if report.get("interrupted") else "FAILED"
    return [
        name,
        str(report.get("mode", "")),
        Cell(said, kind="good" if report["ok"] else "bad"),
        len(mine),
        Cell(f"{sum(one['checks'] for one in mine):,}", key=sum(one["checks"] for one in mine)),
        *(_share(mine, column) for column in columns),
        ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()),
    ]


def _share(operators: Sequence[dict[str, Any]], column: str) -> Cell:
    states = Counter(one["coverage"].get(column, {}).get("state") for one in operators)
    done, open_ = states["checked"], states["not exercised"]
    return Cell(f"{done} of {done + open_}", key=done, kind="warn" if open_ else "good")


def _matrix(operators: Sequence[dict[str, Any]], columns: Sequence[str]) -> Html:
    heads: list[Column | str] = [
        "operator",
        Column("framework", choice=True),
        Column("outcome", choice=True),
        *(Column(name, number=True, hint=_HINTS.get(name, "")) for name in columns),
        Column("gaps", choice=True, hint="what could have been tried and was not"),
        Column("notes", hint="what was not verified, and why"),
    ]
    ordered = sorted(operators, key=lambda one: (one["op"], -len(one["platform"]), one["platform"]))
    rows = [_operator(one, columns) for one in ordered]
    return table("Checks per operator and framework", heads, rows, search=True, tall=True)


def _operator(one: dict[str, Any], columns: Sequence[str]) -> list[Value]:
    outcome = one["outcome"]
    gaps = [name for name in columns if one["coverage"].get(name, {}).get("state") == "not exercised"]
    return [
        Cell(Html(f"<code>{escape(one['op'])}</code>"), key=one["op"]),
        one["platform"],
        Cell(outcome, kind=_KINDS.get(outcome, "bad")),
        *(_count(one["coverage"].get(name)) for name in columns),
        Cell(", ".join(gaps).replace(" a", "\N{NO-BREAK SPACE}a"), key=", ".join(gaps), kind="bad" if gaps else ""),
        _why(one),
    ]


def _count(found: dict[str, Any] | None) -> Cell:
    if found is None:
        return Cell("not told", key="", kind="warn")
    if found["state"] == "checked":
        return Cell(f"{found['checked']:,}", key=found["checked"])
    if found["state"] == "not exercised":
        return Cell("none", key=0, kind="bad")
    return Cell("n/a", key="", kind="quiet")


def _why(one: dict[str, Any]) -> Value:
    """What a reader must know of what was not verified."""
    reasons = [f"{finding['problem']} ({finding['places']})" for kind in ("wrong", "crash") for finding in one[kind]]
    if one["exempt"]:
        reasons.append(f"exempt: {one['exempt']}")
    elif one["outcome"] == "absent":
        reasons.append(f"{one['platform']} has no such operator")
    reasons += [f"{reason} ({count} samples)" for reason, count in one["skipped"].items()]
    if one["unexercised"]:
        reasons.append(f"claimed rows without a sample: {'; '.join(one['unexercised'])}")
    refused = sum(one["rejected"].values())
    if refused:
        reasons.append(f"{refused} placements were refused with an error: {'; '.join(one['rejected'])}")
    if not reasons:
        return ""
    if len(reasons) == 1 and len(reasons[0]) <= _LONG:
        return reasons[0]
    more = f" ({len(reasons)} notes)" if len(reasons) > 1 else ""
    start = reasons[0] if len(reasons[0]) <= _LONG else reasons[0][:_LONG].rstrip() + "…"
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return Html(f"<details><summary>{escape(start + more)}</summary><ul>{items}</ul></details>")

"""The operator matrix: verified and unverified properties of every operator on every framework, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table
from hyper_parallel.verify.prove.operators import LEVELS
from hyper_parallel.verify.prove.table import stored_table
from hyper_parallel.verify.report_files import other_version, read_json

__all__ = ["operators_page", "read_report"]

_LONG = 60
_TALL = 20
_HINTS = {
    "forward": "outputs compared",
    "backward": "gradients of every input compared",
    "uneven": "shards of unequal sizes, empty ones too",
    "several axes": "on a mesh of two or three axes",
    "partial": "with a pending reduction",
}
_KINDS = {"ok": "good", "wrong": "bad", "crash": "bad", "unexercised": "bad", "absent": "quiet", "exempt": "warn"}


def read_report(path: Path) -> dict[str, Any]:
    """Return a report of ``verify ops --report FILE.json``.

    Raises:
        ValueError: the file cannot be read, or was written by another version.
    """
    command = f"hyper-parallel verify ops --report {path.name}"
    report = read_json(path, ("columns", "operators"), command)
    if any("coverage" not in operator for operator in report["operators"]):
        raise ValueError(other_version(path, ["coverage"], command))
    return report


def operators_page(reports: Sequence[dict[str, Any]]) -> str:
    """Return a page for the reports of some frameworks.

    Args:
        reports: JSON reports of ``verify ops``, each of one or several frameworks.
    """
    columns = list(dict.fromkeys(name for report in reports for name in report["columns"]))
    operators = [operator for report in reports for operator in report["operators"]]
    return render(
        "operators.html",
        title="Operators",
        footer="Written from the reports of hyper-parallel verify ops",
        frameworks=_frameworks(reports, columns),
        operators=_matrix(operators, columns),
        details=[_detail(operator) for operator in _ordered(operators)],
    )


def _frameworks(reports: Sequence[dict[str, Any]], columns: Sequence[str]) -> Markup:
    heads: list[Column | str] = [
        "framework", "sweep", "verdict", Column("operators", number=True), Column("checks", number=True),
        *(Column(name, number=True, hint="operators checked, of those to which it applies") for name in columns),
        "outcomes",
    ]  # fmt: skip
    rows = [
        _framework(name, report, columns)
        for report in reports
        for name in dict.fromkeys(operator["platform"] for operator in report["operators"])
    ]
    text = "What was verified per framework: operators checked, of those to which the column applies"
    return table(text, heads, rows, empty="no operator was checked")


def _framework(name: str, report: dict[str, Any], columns: Sequence[str]) -> list[Value]:
    operators = [operator for operator in report["operators"] if operator["platform"] == name]
    outcomes = Counter(operator["outcome"] for operator in operators)
    checks = sum(operator["checks"] for operator in operators)
    verdict = "held" if report["ok"] else "INTERRUPTED" if report.get("interrupted") else "FAILED"
    return [
        name,
        str(report.get("mode", "")),
        Cell(verdict, kind="good" if report["ok"] else "bad"),
        len(operators),
        Cell(f"{checks:,}", key=checks),
        *(_share(operators, column) for column in columns),
        ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()),
    ]


def _share(operators: Sequence[dict[str, Any]], column: str) -> Cell:
    states = Counter(operator["coverage"].get(column, {}).get("state") for operator in operators)
    checked, missed = states["checked"], states["not exercised"]
    return Cell(f"{checked} of {checked + missed}", key=checked, kind="warn" if missed else "good")


def _matrix(operators: Sequence[dict[str, Any]], columns: Sequence[str]) -> Markup:
    heads: list[Column | str] = [
        "operator",
        Column("framework", choice=True),
        Column("outcome", choice=True),
        *(Column(name, number=True, hint=_HINTS.get(name, "")) for name in columns),
        Column("rows", hint="levels of the rows of the rule in the stored table of proofs"),
        Column("gaps", choice=True, hint="what could have been tried and was not"),
        Column("notes", hint="what was not verified, and why"),
    ]
    rows = [_operator(operator, columns) for operator in _ordered(operators)]
    return table("Checks per operator and framework", heads, rows, search=True, tall=True)


def _ordered(operators: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return operators sorted by name, with the frameworks of each next to each other."""
    return sorted(operators, key=lambda operator: (operator["op"], -len(operator["platform"]), operator["platform"]))


def _anchor(operator: dict[str, Any]) -> str:
    return f"{operator['op']}-{operator['platform']}"


def _detail(operator: dict[str, Any]) -> dict[str, Any]:
    """Return the details of an operator: rule, samples, rejected calls, gaps, and the checks of its placements."""
    samples = [f"{name}: {count:,} checks" for name, count in operator.get("by_sample", {}).items()]
    lists = {
        "Rule": [operator["rule"]] if operator.get("rule") else [],
        "Samples": samples + [f"not checked: {why} ({count} samples)" for why, count in operator["skipped"].items()],
        "Refusals": [f"{text} ({count} placements)" for text, count in operator["rejected"].items()],
        "Claimed rows without a sample": operator["unexercised"],
        "Rows that hold and are not claimed": operator.get("missing", []),
        "Checks per mesh": [f"{mesh}: {count:,}" for mesh, count in operator.get("by_mesh", {}).items()],
    }
    return {
        "id": _anchor(operator),
        **{name: operator[name] for name in ("op", "platform", "outcome")},
        "checks": f"{operator['checks']:,}",
        "lists": [{"name": name, "lines": lines} for name, lines in lists.items() if lines],
        "counts": _placements(operator),
    }


def _placements(operator: dict[str, Any]) -> Markup | str:
    """Return the number of checks for each combination of placements, in ascending order."""
    counts = sorted(operator.get("by_placement", {}).items(), key=lambda pair: pair[1])
    rows: list[list[Value]] = [[places, Cell(f"{count:,}", key=count)] for places, count in counts]
    if not rows:
        return ""
    text = (
        f"Checks of {operator['op']} on {operator['platform']} per placements of inputs and outputs, meshes of one axis"
    )
    return table(text, ["placements", Column("checks", number=True)], rows, tall=len(rows) > _TALL)


def _operator(operator: dict[str, Any], columns: Sequence[str]) -> list[Value]:
    outcome, coverage = operator["outcome"], operator["coverage"]
    gaps = [name for name in columns if coverage.get(name, {}).get("state") == "not exercised"]
    return [
        Cell(Markup('<a href="#{}"><code>{}</code></a>').format(_anchor(operator), operator["op"]), key=operator["op"]),
        operator["platform"],
        Cell(outcome, kind=_KINDS.get(outcome, "bad")),
        *(_count(coverage.get(name)) for name in columns),
        _levels(operator["op"]),
        Cell(", ".join(gaps).replace(" a", "\N{NO-BREAK SPACE}a"), key=", ".join(gaps), kind="bad" if gaps else ""),
        _notes(operator),
    ]


def _levels(op: str) -> Cell:
    """Return a cell with the numbers of proven, tested and assumed combinations of placements; sorted by the proven."""
    counts = stored_table().counts(op)
    text = ", ".join(f"{level} {counts[level]}" for level in LEVELS if counts[level])
    return Cell(text or "no rows", key=counts["proven"], kind="" if text else "quiet")


def _count(column: dict[str, Any] | None) -> Cell:
    if column is None:
        return Cell("not reported", key="", kind="warn")
    if column["state"] == "checked":
        return Cell(f"{column['checked']:,}", key=column["checked"])
    if column["state"] == "not exercised":
        return Cell("none", key=0, kind="bad")
    return Cell("n/a", key="", kind="quiet")


def _notes(operator: dict[str, Any]) -> Value:
    """Return the reasons why something was not verified; long lists are folded."""
    reasons = _reasons(operator)
    if not reasons:
        return ""
    if len(reasons) == 1 and len(reasons[0]) <= _LONG:
        return reasons[0]
    more = f" ({len(reasons)} notes)" if len(reasons) > 1 else ""
    start = reasons[0] if len(reasons[0]) <= _LONG else reasons[0][:_LONG].rstrip() + "…"
    return render("notes.html", summary=start + more, reasons=reasons)


def _reasons(operator: dict[str, Any]) -> list[str]:
    reasons = [
        f"{finding['problem']} ({finding['places']})" for kind in ("wrong", "crash") for finding in operator[kind]
    ]
    if operator["exempt"]:
        reasons.append(f"exempt: {operator['exempt']}")
    elif operator["outcome"] == "absent":
        reasons.append(f"{operator['platform']} has no such operator")
    reasons += [f"{reason} ({count} samples)" for reason, count in operator["skipped"].items()]
    if operator["unexercised"]:
        reasons.append(f"claimed rows without a sample: {'; '.join(operator['unexercised'])}")
    refused = sum(operator["rejected"].values())
    if refused:
        reasons.append(f"{refused} placements were refused with an error: {'; '.join(operator['rejected'])}")
    return reasons

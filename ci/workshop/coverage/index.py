"""The page over all reports: what was measured, what held, and what was skipped and why. No external assets."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hyper_parallel.verify.pages import Column, table
from hyper_parallel.verify.pages.charts import bar
from hyper_parallel.verify.pages.operators_page import operators_page, read_report
from hyper_parallel.verify.pages.tables import Cell, Value, code
from hyper_parallel.verify.report_files import read_json, reading, write_text
from workshop.bench.page import MINDSPORE, RATIOS, TIMINGS, TRAINING, bench_page, read_rows
from workshop.conformance.page import contract_page
from workshop.conformance.results import load
from workshop.mutation.page import mutation_page, read_mutation
from workshop.nights.reports import read_suite
from workshop.pages import render

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from workshop.coverage.settings import Settings
    from workshop.coverage.store import Store

__all__ = ["skipped_tests", "write_index", "write_others", "write_pit"]

_OTHERS = {
    "operators.html": "operators by framework and direction",
    "mutation.html": "power of the verifier",
    "bench.html": "what it costs: operations compared with PyTorch's DTensor and plain MindSpore, and the harness",
    "reference/index.html": "API reference, from the docstrings (tox -e docs)",
    "contract.html": "platform contract by framework, device and transport; memory figures; gap ledgers",
}
"""Reports next to the coverage, by file name."""


def write_index(store: Store, settings: Settings, planned: tuple[str, ...] = ()) -> Path:
    """Write ``coverage_reports/index.html``.

    Args:
        store: where the reports lie.
        settings: which environments have floors; those without a report are listed as not run.
        planned: more environments that were to run.
    """
    there = store.environments()
    combined = ["combined"] if (store.folder("combined") / "coverage.json").exists() else []
    wanted = [*(name for name in settings.environments if name != "combined"), *planned]
    absent = [name for name in dict.fromkeys(wanted) if name not in there]
    text = render(
        "coverage.html",
        title="Coverage",
        footer="",
        environments=_table(store, [*there, *combined]),
        files=[_files(store, name) for name in [*combined, *there]],
        reports=_reports(store),
        skipped=_left_out(store, settings, there, absent),
    )
    return write_text(store.reports / "index.html", text)


def _reports(store: Store) -> list[tuple[str, str, bool]]:
    """Return file name, title and existence of every report next to the index, those of other commands included."""
    more = sorted(path.name for path in store.reports.glob("*.html") if path.name not in {"index.html", *_OTHERS})
    known = [(name, text, (store.reports / name).exists()) for name, text in _OTHERS.items()]
    return [*known, *((name, name.removesuffix(".html").replace("-", " "), True) for name in more)]


def _files(store: Store, name: str) -> Markup:
    """Return the files of an environment with the share that its tests reach, the least covered ones first."""
    columns: list[Column | str] = [
        "file", Column("covered", number=True), "share", Column("missing lines", number=True),
    ]  # fmt: skip
    path = store.folder(name) / "coverage.json"
    with reading(path):
        files = (
            read_json(path, ("files",), f"python ci/workshop coverage gate {name}")["files"] if path.exists() else {}
        )
        summaries = [(file, content["summary"]) for file, content in files.items()]
        summaries.sort(key=lambda pair: pair[1]["percent_covered"])
        rows = [_file(file, summary) for file, summary in summaries]
    text = f"Lines and branches of every file in {name}, the least covered ones first"
    return table(text, columns, rows, search=True, tall=True, empty="no file was measured")


def _file(file: str, summary: Mapping[str, Any]) -> list[Value]:
    share, missing = float(summary["percent_covered"]), int(summary["missing_lines"])
    shown = Cell(bar(share / 100, f"{share:.2f} % of {file}"), key=share)
    return [code(file), Cell(f"{share:.2f} %", key=share), shown, missing]


def _table(store: Store, names: list[str]) -> Markup:
    columns: list[Column | str] = [
        "environment",
        Column("covered", number=True),
        Column("ranks", number=True),
        "gates",
        "reports",
    ]
    rows = [_row(store, name) for name in names]
    return table("What every environment measured", columns, rows, empty="nothing was measured")


def _row(store: Store, name: str) -> list[str | Markup]:
    path = store.folder(name) / "gate.json"
    verdict: dict[str, Any] = {}
    if path.exists():
        verdict = read_json(path, ("total",), f"python ci/workshop coverage gate {name}")
    with reading(path):
        total = f"{verdict['total']:.2f} %" if verdict else "?"
        gates = render("gates.html", verdict=verdict)
    links = Markup('<a href="{0}/html/index.html">lines</a> · <a href="{0}/coverage.xml">Cobertura</a>').format(name)
    return [name, total, str(verdict.get("ranks", "")), gates, links]


def write_others(store: Store) -> list[Path]:
    """Write the matrix of operators, the verifier's power, the costs and the contract, each from its reports if any.

    Raises:
        ValueError: a report cannot be read, or was written by another version.
    """
    reports = store.root / "reports"
    written = []
    sweeps = sorted(reports.glob("operators-*.json"))
    if sweeps:
        with reading(*sweeps):
            text = operators_page([read_report(path) for path in sweeps])
        written.append(write_text(store.reports / "operators.html", text))
    power = reports / "mutation.json"
    if power.exists():
        mutation = read_mutation(power)
        with reading(power):
            written.append(write_text(store.reports / "mutation.html", mutation_page(mutation)))
            written.append(write_pit(mutation, store.reports / "mutation.xml"))
    names = (RATIOS, TIMINGS, MINDSPORE, TRAINING)
    costs = [read_rows(reports, name) for name in names]
    if any(costs):
        with reading(*(reports / name for name in names)):
            text = bench_page(*costs)
        written.append(write_text(store.reports / "bench.html", text))
    with reading(*sorted(reports.glob("contract-*.json")), *sorted(reports.glob("footprint-*.json"))):
        outcomes, footprints = load(reports)
        text = contract_page(outcomes, footprints) if outcomes or footprints else ""
    if text:
        written.append(write_text(store.reports / "contract.html", text))
    return written


def _left_out(store: Store, settings: Settings, there: list[str], absent: list[str]) -> list[str]:
    items = [f"{name}: no report; the environment did not run, or failed before its gate" for name in absent]
    for name in there:
        omit = settings.environment(name).omit
        items += [f"{name}: {pattern} is omitted: it cannot run there, or its tests do not" for pattern in omit]
        for reason, count in sorted(skipped_tests(store.root / "reports" / f"{name}.xml").items()):
            items.append(f"{name}: {count} tests were skipped: {reason}")
    return items


def skipped_tests(junit: Path) -> Counter[str]:
    """Reasons of skipped tests in a JUnit file, with their numbers; a file that is not there has none."""
    suite = read_suite(junit, junit.stem) if junit.exists() else None
    return Counter() if suite is None else suite.skipped


def write_pit(report: Mapping[str, Any], path: Path) -> Path:
    """Write a ``<mutation>`` for every mutant that claims something false.

    Equivalent mutants and those that claim more, but truly, are left out, as in the report's score.

    Args:
        report: as ``python ci/workshop mutants`` writes it.
        path: the file to write.

    Raises:
        ValueError: it cannot be written.
    """
    root = ET.Element("mutations")
    for operator, number, status in _mutants(report):
        mutation = ET.SubElement(root, "mutation", detected=str(status == "KILLED").lower(), status=status)
        facts = {
            "sourceFile": "rules",
            "mutatedClass": "hyper_parallel.core.shard.rules",
            "mutatedMethod": operator,
            "methodDescription": "",
            "lineNumber": str(number),
            "mutator": "rule",
            "killingTest": "verify ops --quick" if status == "KILLED" else "",
            "description": "",
        }
        for name, text in facts.items():
            ET.SubElement(mutation, name).text = text
    return write_text(path, ET.tostring(root, "unicode", xml_declaration=True))


def _mutants(report: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Operator, number and status; the plugin tells two mutants of one method apart by their line, here a number."""
    survived = Counter(survivor["op"] for survivor in report["survivors"])
    for operator, counts in report["operators"].items():
        statuses = ["KILLED"] * counts["killed"] + ["SURVIVED"] * survived[operator]
        for number, status in enumerate(statuses, 1):
            yield operator, number, status

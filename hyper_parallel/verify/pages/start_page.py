"""The start page of a folder: lists every report in it with verdict and link."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from markupsafe import Markup

from hyper_parallel.transport.atomic_files import atomic_write_text
from hyper_parallel.verify.pages.document import text_of
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table

if TYPE_CHECKING:
    from typing import Any

__all__ = ["FoundReport", "link_back", "reports_in", "start_page"]

_OWN = '<meta name="generator" content="hyper-parallel">'
_BACK = re.compile(r"<!--start-->.*?<!--end-->", re.DOTALL)
_VERDICT = re.compile(r'<div class="verdict (good|bad)"><strong>(.*?)</strong>', re.DOTALL)
_TALL = 20


@dataclass(frozen=True)
class FoundReport:
    """One report in a folder.

    Attributes:
        path: path of the report's file.
        title: subject of the report.
        good: whether the verdict is a pass; None without a verdict.
        verdict: verdict in words.
        date: start of the run.
        command: command that wrote the report.
    """

    path: Path
    title: str
    good: bool | None
    verdict: str
    date: str
    command: str


def reports_in(folder: Path, without: Path | None = None) -> list[FoundReport]:
    """Return the pages and JSON reports in a folder and its subfolders, failed ones first.

    Args:
        folder: folder of the reports.
        without: file to leave out, the start page itself.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in {".html", ".json"} and path.is_file()]
    found = [_of_page(path) if path.suffix == ".html" else _of_json(path) for path in paths]
    known = [report for report in found if report is not None and report.path != without]
    return sorted(known, key=lambda report: report.good is not False)


def start_page(folder: Path, reports: Sequence[FoundReport], page: Path) -> str:
    """Return the start page as an HTML document.

    Args:
        folder: folder of the reports.
        reports: reports in the folder.
        page: file of the start page; links are relative to it.
    """
    failed = sum(report.good is False for report in reports)
    words = f"{failed} of {len(reports)} reports failed" if failed else f"{len(reports)} reports, none failed"
    heads: list[Column | str] = [
        "report", Column("of", choice=True), Column("result", choice=True), Column("verdict", words=True), "date",
        Column("command", words=True),
    ]  # fmt: skip
    rows: list[list[Value]] = [_row(report, page) for report in reports]
    text = f"Every report in {folder.name or folder}, failed ones first"
    return render(
        "report.html",
        title="Reports",
        footer="Written by hyper-parallel reports FOLDER --html FILE",
        good=bool(reports) and not failed,
        verdict=words if reports else "no report was found",
        sections={"": table(text, heads, rows, search=True, tall=len(rows) > _TALL, empty="no report")},
    )


def link_back(reports: Sequence[FoundReport], page: Path) -> None:
    """Add a link to the start page at the top of each page in ``reports``; pages that cannot be written are skipped."""
    for report in reports:
        if report.path.suffix != ".html":
            continue
        address = escape(_address(page, report.path), quote=True)
        link = f'<!--start--><p class="start"><a href="{address}">All reports</a></p><!--end-->'
        with contextlib.suppress(OSError):
            text = report.path.read_text(encoding="utf-8")
            atomic_write_text(report.path, _BACK.sub(lambda _, new=link: new, text, count=1))  # type: ignore[misc]


def _row(report: FoundReport, page: Path) -> list[Value]:
    address = _address(report.path, page)
    link = Markup('<a href="{}"><code>{}</code></a>').format(address, unquote(address))
    result = {True: Cell("passed", kind="good"), False: Cell("failed", kind="bad"), None: Cell("", key="")}
    return [Cell(link, key=address), report.title, result[report.good], report.verdict, report.date, report.command]


def _address(target: Path, page: Path) -> str:
    """Return the address of a file, relative to a page."""
    return quote(Path(os.path.relpath(target.resolve(), page.resolve().parent)).as_posix())


def _of_page(path: Path) -> FoundReport | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if _OWN not in text:
        return None
    verdict = _VERDICT.search(text)
    return FoundReport(
        path,
        _inside(text, r"<title>(.*?)</title>"),
        None if verdict is None else verdict[1] == "good",
        "" if verdict is None else text_of(verdict[2]),
        _inside(text, r'<meta name="date" content="(.*?)">'),
        _inside(text, r'<meta name="command" content="(.*?)">'),
    )


def _of_json(path: Path) -> FoundReport | None:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    header = content.get("header") if isinstance(content, dict) else None
    if not isinstance(header, dict):
        return None
    good = content.get("ok", content.get("equal"))
    words = content.get("headline", "")
    return FoundReport(
        path,
        "data for programs",
        good if isinstance(good, bool) else None,
        words if isinstance(words, str) else "",
        str(header.get("date", "")),
        str(header.get("command", "")),
    )


def _inside(text: str, pattern: str) -> str:
    match = re.search(pattern, text, re.DOTALL)
    return "" if match is None else text_of(match[1])

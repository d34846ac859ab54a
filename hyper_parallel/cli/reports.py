"""``hyper-parallel reports``: list every report in a folder with its verdict, and write a start page with links."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hyper_parallel._text import printable
from hyper_parallel.cli.output import can_be_written, coloured, print_result
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
List the reports in a folder and its subfolders, failed ones first: pages that --html wrote, and JSON reports that
--report wrote. With --html, write a start page that links all of them, such as those of one night; the pages get a
link to it.

Exit status: 0 if there are reports and none failed, 1 if one failed, 2 if none was found."""

_EXAMPLES = (
    "hyper-parallel reports reports",
    "hyper-parallel reports reports --html reports/index.html",
)


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    subparser = commands.add_parser(
        "reports",
        help="list the reports in a folder, and write a start page",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/reading-the-reports.md",
    )
    subparser.add_argument("folder", metavar="FOLDER", help="folder with pages and JSON reports")
    subparser.add_argument("--html", metavar="FILE", help="also write a start page with a link to every report")
    subparser.add_argument("--json", action="store_true", help="print the list as JSON on stdout")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list and write the page; return 1 if a report failed.

    Raises:
        ValueError: the folder is missing or has no report.
    """
    from hyper_parallel.verify.pages.start_page import link_back, reports_in, start_page

    folder = Path(arguments.folder)
    if not folder.is_dir():
        msg = f"{folder} is not a folder" if folder.exists() else f"the folder {folder} does not exist"
        raise ValueError(msg)
    can_be_written("--html", arguments.html)
    page = None if arguments.html is None else Path(arguments.html)
    reports = reports_in(folder, page)
    if not reports:
        msg = f"{folder} has no report: pages of --html FILE and JSON reports of --report FILE.json are looked for"
        raise ValueError(msg)
    if page is not None:
        write_text(page, start_page(folder, reports, page), "--html")
        link_back(reports, page)
    failed = sum(report.good is False for report in reports)
    if arguments.json:
        rows = [
            {"path": str(report.path), "title": report.title, "ok": report.good, "verdict": report.verdict,
             "date": report.date, "command": report.command}
            for report in reports
        ]  # fmt: skip
        print_result(report_json({"ok": not failed, "reports": rows}))
        return 1 if failed else 0
    words = {True: "passed", False: "FAILED", None: "no verdict"}
    for report in reports:
        print_result(coloured(printable(f"{report.path}: {words[report.good]}: {report.verdict or report.title}")))
    print_result(f"{len(reports)} reports, {failed} failed")
    return 1 if failed else 0

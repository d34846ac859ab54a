"""``python ci/workshop trend``: the values of nightly reports over the nights, in one file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hyper_parallel.cli.arguments import int_range
from hyper_parallel.cli.output import can_be_written, coloured, print_result
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

if TYPE_CHECKING:
    from workshop.nights.changes import NightChanges
    from workshop.nights.history import Night

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Keep a few values of every night in one file, HISTORY, and show how they changed: numbers of checks, outcomes and tests,
coverage, ratios of times. With --add, the reports become the newest night; HISTORY is created if it does not exist.
REPORT is a JSON file that --report wrote, the gate.json of coverage gate, a JUnit file, or a folder of such files.
--night writes one page of these reports: suites by device and framework, failed and skipped tests, and what is new
since the night before. The log of each failed test, with the output of its ranks, is written to a file in FILE-logs.

Exit status: 0 if the history could be read and written, 2 for invalid input. To fail if something got worse, use
compare."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "trend",
        help="keep values of nightly reports, and show how they changed",
        description=_DESCRIPTION,
    )
    parser.add_argument("history", metavar="HISTORY", help="JSON file that this command reads and writes")
    parser.add_argument("--add", nargs="+", metavar="REPORT", help="reports of a new night")
    parser.add_argument(
        "--keep", type=int_range(1), default=60, metavar="N", help="number of nights to keep (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print the history as JSON on stdout")
    parser.add_argument("--html", metavar="FILE", help="also write a page with curves")
    parser.add_argument("--night", metavar="FILE", help="also write a page of the reports that --add adds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Add a night if there is one, and print the history."""
    from workshop.nights.history import History, read_history

    path = Path(arguments.history)
    can_be_written("--html", arguments.html)
    can_be_written("--night", arguments.night)
    if arguments.night is not None and not arguments.add:
        msg = "--night writes a page of new reports; name the reports with --add REPORT"
        raise ValueError(msg)
    nights = read_history(path) if path.exists() or not arguments.add else ()
    if arguments.add:
        nights = _with_new_night(arguments, path, nights)
    if not nights:
        msg = f"{path} has no nights: add one with --add REPORT"
        raise ValueError(msg)
    history = History(nights)
    if arguments.html is not None:
        from workshop.nights.trend_page import trend_page

        write_text(arguments.html, trend_page(history, _address(arguments.night, arguments.html)), "--html")
    print_result(report_json(history.json()) if arguments.json else coloured(history.text()))
    return 0


def _with_new_night(arguments: argparse.Namespace, path: Path, nights: tuple[Night, ...]) -> tuple[Night, ...]:
    """Add the reports to the nights, write them to the file, and the page of the new night if one is wanted."""
    from workshop.nights.changes import NightChanges
    from workshop.nights.history import History, night_of
    from workshop.nights.reports import read_reports

    reports = read_reports([Path(report) for report in arguments.add])
    past = nights[-1] if nights else None
    history = History((*nights, night_of(reports, past))[-arguments.keep :])
    write_text(path, json.dumps(history.json(), indent=1) + "\n", "HISTORY")
    if arguments.night is not None:
        nights_page = _address(arguments.html, arguments.night)
        _write_night(Path(arguments.night), NightChanges(reports, history), nights_page)
    return history.nights


def _address(target: str | None, page: str) -> str:
    """Return the address of a page, relative to another one; empty if it is not written."""
    if target is None:
        return ""
    return quote(Path(os.path.relpath(Path(target).resolve(), Path(page).resolve().parent)).as_posix())


def _write_night(path: Path, night: NightChanges, nights_page: str) -> None:
    """Write the page of a night, and the logs of its failed tests next to it."""
    from workshop.nights.changes import write_logs
    from workshop.nights.night_page import night_page

    files = write_logs(night, path.with_name(f"{path.stem}-logs"))
    logs = {test: quote(file.relative_to(path.parent).as_posix()) for test, file in files.items()}
    write_text(path, night_page(night, logs, nights_page), "--night")

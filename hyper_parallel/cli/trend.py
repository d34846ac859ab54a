"""``hyper-parallel trend``: the values of nightly reports over the nights, in one file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hyper_parallel.cli.arguments import whole
from hyper_parallel.cli.colour import coloured
from hyper_parallel.cli.output import can_be_written
from hyper_parallel.verify.report_files import write_text
from hyper_parallel.verify.run_header import report_json

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Keep a few values of every night in one file, HISTORY, and show how they changed: numbers of checks, outcomes and tests,
coverage, ratios of times. With --add the reports become the newest night; HISTORY is made if it does not exist.
REPORT is a JSON file that --report wrote, the gate.json of coverage gate, a JUnit file, or a folder of them.

Exit status: 0 if the history could be read and written, 2 for invalid input. compare is the command that fails if
something got worse."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "trend",
        help="values of nightly reports over the nights",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("history", metavar="HISTORY", help="a JSON file that this command writes")
    parser.add_argument("--add", nargs="+", metavar="REPORT", help="the reports of a new night")
    parser.add_argument("--keep", type=whole(1), default=60, metavar="N", help="number of nights to keep (default: 60)")
    parser.add_argument("--json", action="store_true", help="the history as JSON on stdout")
    parser.add_argument("--html", metavar="FILE", help="also write a page with curves")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Add a night if there is one, and print the history."""
    from hyper_parallel.verify.run_history import History, night_of, read_history

    path = Path(arguments.history)
    can_be_written("--html", arguments.html)
    nights = read_history(path) if path.exists() or not arguments.add else ()
    if arguments.add:
        nights = (*nights, night_of([Path(report) for report in arguments.add]))[-arguments.keep :]
    if not nights:
        msg = f"{path} has no nights: add one with --add REPORT"
        raise ValueError(msg)
    history = History(nights)
    if arguments.add:
        write_text(path, json.dumps(history.json(), indent=1) + "\n", "HISTORY")
    if arguments.html is not None:
        from hyper_parallel.verify.pages.trend_page import trend_page

        write_text(arguments.html, trend_page(history), "--html")
    print(report_json(history.json()) if arguments.json else coloured(history.text()))
    return 0

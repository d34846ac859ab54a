"""``hyper-parallel compare``: compare two reports of one command, and list what got worse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hyper_parallel.cli.output import can_be_written, coloured, print_result
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Compare two JSON reports of one command, such as those of two nights: of verify ops, verify model or fuzz, or of the
maintainers' mutants, bench and coverage gate. Regressions come first; an entry that the second report lacks counts
as a regression. A time or ratio counts as changed if it differs by a quarter or more.

Exit status: 0 if nothing got worse, 1 if something did, 2 for invalid input."""

_EXAMPLES = (
    "hyper-parallel compare before.json after.json",
    "hyper-parallel compare before.json after.json --html changes.html",
)


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "compare",
        help="compare two reports of one command: what got worse",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/reading-the-reports.md",
    )
    parser.add_argument("before", metavar="BEFORE", help="JSON report of the first run")
    parser.add_argument("after", metavar="AFTER", help="JSON report of the second run")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON on stdout")
    parser.add_argument("--html", metavar="FILE", help="also write a page with both reports side by side")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 0 if nothing got worse."""
    from hyper_parallel.verify.run_comparison import compare_reports

    can_be_written("--html", arguments.html)
    comparison = compare_reports(Path(arguments.before), Path(arguments.after))
    if arguments.html is not None:
        from hyper_parallel.verify.pages.report_pages import comparison_page

        write_text(arguments.html, comparison_page(comparison), "--html")
    print_result(report_json(comparison.json()) if arguments.json else coloured(comparison.text()))
    return 0 if comparison.ok else 1

"""``hyper-parallel trace``: show the flight records of a failed world as a table and as a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.cli.output import can_be_written, print_result
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

if TYPE_CHECKING:
    from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Print what the ranks of a failed run were doing: which rank raised, where each rank is, and the first call on which
ranks differ. Set HP_FLIGHT_FOLDER to a folder before the run starts: when the run fails, times out or loses a rank,
the last 256 calls of each rank are written there.

Exit status: 0 if the records could be read, 2 if there are none or they are damaged."""

_EXAMPLES = (
    "HP_FLIGHT_FOLDER=flight python train.py; hyper-parallel trace flight",
    "hyper-parallel trace flight --html timeline.html",
)


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    subparser = commands.add_parser(
        "trace",
        help="print what the ranks of a failed run were doing",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/launchers.md",
    )
    subparser.add_argument("folder", metavar="FOLDER", help="folder that HP_FLIGHT_FOLDER named during the run")
    subparser.add_argument("--perfetto", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing")
    subparser.add_argument(
        "--html", metavar="FILE", help="write a page with a timeline of every rank: compute and collectives"
    )
    subparser.add_argument("--json", action="store_true", help="print the merged record as JSON on stdout")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and write the trace."""
    from hyper_parallel.transport.checks.flight_trace import read_flight

    flight = read_flight(Path(arguments.folder))
    can_be_written("--perfetto", arguments.perfetto)
    can_be_written("--html", arguments.html)
    if arguments.perfetto is not None:
        write_text(arguments.perfetto, json.dumps(flight.chrome()), "--perfetto")
    if arguments.html is not None:
        from hyper_parallel.verify.pages.timeline_page import timeline_page

        write_text(arguments.html, timeline_page(flight), "--html")
    if arguments.json:
        raised = {str(rank): error for rank, error in flight.raised().items()}
        records = {str(rank): record for rank, record in sorted(flight.records.items())}
        content = {"ok": True, "world_size": flight.world_size, "raised": raised, "difference": flight.difference()}
        print_result(report_json({**content, "ranks": records}))
    else:
        print(flight.text())
    return 0

"""``python ci/workshop self-test``: cause each kind of failure on purpose, and check that the harness catches it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from hyper_parallel._text import first_line
from hyper_parallel.cli.output import coloured, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import platforms
from hyper_parallel.platform.select import FRAMEWORKS
from hyper_parallel.verify.report import report_json

__all__ = ["add_parser", "run"]

_LAUNCHES = ("simulated", "processes")


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    text = "inject wrong models, hangs, crashes, mismatches and lost coverage, and check that each is caught"
    subparser = commands.add_parser("self-test", help=text, description=text)
    subparser.add_argument(
        "--platform", choices=FRAMEWORKS, action="append", help="framework (default: those installed); repeatable"
    )
    subparser.add_argument(
        "--launch", choices=_LAUNCHES, action="append", help="how ranks run (default: both ways); repeatable"
    )
    subparser.add_argument("--json", action="store_true", help="print the results as JSON")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every injection; return 0 if all were caught."""
    from workshop.self_test.injections import injections

    jobs = [
        (platform, launch, injection)
        for platform in _platforms(arguments.platform)
        for launch in arguments.launch or _LAUNCHES
        for injection in injections(platform, launch)
    ]
    progress, rows = Progress(len(jobs)), list[dict[str, Any]]()
    for platform, launch, injection in jobs:
        try:
            with progress.running(f"{injection.name} on {platform} ({launch})"):
                result = injection.run()
        except KeyboardInterrupt:
            progress.clear()
            caught = sum(row["caught"] for row in rows)
            msg = f"partial report: {len(rows)} of {len(jobs)} injections ran, {caught} of them as expected"
            raise KeyboardInterrupt(msg) from None
        rows.append({"platform": platform, "launch": launch, **asdict(result)})
        if not arguments.json:
            _print(rows[-1])
    caught = sum(row["caught"] for row in rows)
    if arguments.json:
        print_result(report_json({"ok": caught == len(rows), "results": rows}))
    else:
        print(f"{caught} of {len(rows)} as expected")
    return 0 if caught == len(rows) else 1


def _platforms(asked: list[str] | None) -> list[str]:
    return platforms(",".join(asked) if asked else None)


def _print(row: dict[str, Any]) -> None:
    state = "as expected" if row["caught"] else "MISSED"
    what = f"{row['name']} on {row['platform']} ({row['launch']})"
    message = row["message"] if not row["caught"] else first_line(row["message"])
    print(coloured(f"{state:11}  {row['seconds']:5.1f} s  {what}: {message}"), flush=True)

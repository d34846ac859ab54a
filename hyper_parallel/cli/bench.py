"""``hyper-parallel bench``: what the library costs the host, beside PyTorch's own DTensor in the same run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from hyper_parallel.cli.progress import Progress
from hyper_parallel.platform.select import platform_named

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    one = commands.add_parser("bench", help="microseconds per operation, and ratios to PyTorch's DTensor")
    one.add_argument("--repeats", type=int, default=1000, help="calls per measurement (default 1000, about 20 s)")
    one.add_argument("--json", action="store_true", help="the rows as JSON")
    one.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; 0 if every ratio is within its budget.

    Raises:
        ValueError: no repeats.
    """
    if arguments.repeats < 1:
        msg = f"--repeats {arguments.repeats} must be at least 1"
        raise ValueError(msg)
    rows = _measured(arguments.repeats)
    if arguments.json:
        print(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=2))
    else:
        print(f"{'':34}{'plain µs':>10}{'peer µs':>10}{'ours µs':>10}{'ratio':>8}{'budget':>8}")
        for row in rows:
            print(f"{row.name:34}{row.plain:10.1f}{row.peer:10.1f}{row.ours:10.1f}{row.ratio:8.2f}{row.budget:8.2f}")
        print("ratio: our overhead over the plain operation / PyTorch DTensor's; for the block: ours / written by hand")
    return 0 if all(row.ratio <= row.budget for row in rows) else 1


def _measured(repeats: int) -> list[Any]:
    count, rows = platform_named("torch").benchmark(repeats)
    progress, done = Progress(count), []
    progress.start("measuring")
    for row in rows:
        done.append(row)
        progress.finish()
        progress.start(f"after {row.name}")
    progress.clear()
    return done

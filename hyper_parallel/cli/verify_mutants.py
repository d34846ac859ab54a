"""``hyper-parallel verify mutants``."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from hyper_parallel.cli.output import can_be_written
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import names_of, platforms
from hyper_parallel.cli.verify_ops import operators
from hyper_parallel.platform.select import FRAMEWORKS
from hyper_parallel.verify.report_files import write_text

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Change sharding rules, one place at a time, and count how many changes the quick sweep notices: a reduction forgotten or
of another kind, a dim shifted, a summand on every rank, an operator taken for linear, a condition nobody checks, the
adapter of the next rank, a gradient not reduced.

Every operator gives the same number of mutants, drawn with a seed. One that claims nothing that the rule does not claim
too is equivalent, and not counted. What survives is listed, with what the full mode says of it.

With --source: mutants of the library's own code instead, of redistribution and of the dispatcher: held against changes
of placement, functions on DTensors, scenarios of the dispatcher, and what plans cost. A change that nothing can notice
is equivalent where a table says why; what else survives is listed. --each 200 is all of them.

Exit status: 0 if the score reaches the floor, 1 if not, 2 for invalid input, 130 after Ctrl-C."""
_EACH = 5  # of every operator, at first; four hundred have a rule


def add_parser(kinds: Any) -> None:
    """Declare the subcommand."""
    one = kinds.add_parser(
        "mutants",
        help="how many changed rules the verifier notices",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("--op", nargs="+", metavar="NAME", help="only mutants of these operators")
    text = "mutants of the library's own code, of these modules or all, as in core.shard.dispatch"
    one.add_argument("--source", nargs="*", metavar="MODULE", help=text)
    one.add_argument("--platform", default="torch", metavar="torch", help="one framework (default: torch)")
    one.add_argument("--each", type=int, default=_EACH, metavar="N", help=f"mutants per operator (default: {_EACH})")
    one.add_argument("--wanted", type=int, default=0, metavar="N", help="fail if there are fewer in all")
    one.add_argument("--floor", type=float, default=99.5, metavar="PERCENT", help="least score (default: 99.5)")
    one.add_argument("--seed", type=int, default=0, metavar="N", help="what draws the mutants (default: 0)")
    one.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    one.add_argument("--report", metavar="PATH", help="also write the report there, as JSON")
    one.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the mutants; 0 if enough were noticed."""
    from hyper_parallel.verify.ops import tasks
    from hyper_parallel.verify.ops.mutation.report import MutantResult, Score
    from hyper_parallel.verify.ops.worker_pool import run_tasks

    if arguments.each < 1:
        msg = f"--each {arguments.each}: at least 1"
        raise ValueError(msg)
    modules = None if arguments.source is None else _modules(arguments)
    (platform,) = platforms(arguments.platform)[:1]
    can_be_written("--report", arguments.report)
    asked = (
        tasks.mutant_tasks(platform, operators(arguments.op), arguments.each, arguments.seed)
        if modules is None
        else tasks.source_tasks(modules, arguments.each, arguments.seed)
    )
    score = Score(platform, arguments.wanted, arguments.seed)
    progress, started = Progress(sum(len(one["ops"]) for one in asked)), time.monotonic()
    try:
        for verdict in run_tasks(MutantResult, asked, lambda _, op: progress.start(op)):
            score.add(verdict)
            progress.finish()
    except KeyboardInterrupt:
        progress.clear()
        score.interrupted = "interrupted; the other mutants were not run"
        score.seconds = time.monotonic() - started
        _write(arguments, score.json())
        raise KeyboardInterrupt(score.text()) from None
    score.seconds = time.monotonic() - started
    print(json.dumps(score.json(), indent=2) if arguments.json else score.text())
    _write(arguments, score.json())
    return 0 if score.ok(arguments.floor / 100) else 1


def _modules(arguments: argparse.Namespace) -> list[str]:
    """Which are asked for, in whole."""
    from hyper_parallel.verify.ops.mutation.suite.checks import MODULE_CHECKS

    if arguments.op:
        msg = "--op: operators have rules; --source changes the library's own code, which has none"
        raise ValueError(msg)
    platform = names_of(arguments.platform, "--platform", FRAMEWORKS)[0]
    if platform != "torch":
        msg = f"--source --platform {platform}: both frameworks run the same code, which is tried on torch only"
        raise ValueError(msg)
    asked = [f"hyper_parallel.{one}" for one in arguments.source]
    for one in asked:
        if one not in MODULE_CHECKS:
            known = ", ".join(known.removeprefix("hyper_parallel.") for known in MODULE_CHECKS)
            msg = f"--source {one.removeprefix('hyper_parallel.')}: no module on trial; there are {known}"
            raise ValueError(msg)
    return asked or list(MODULE_CHECKS)


def _write(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if arguments.report is not None:
        write_text(arguments.report, json.dumps(report, indent=2) + "\n", "--report")

"""``python ci/workshop mutants``."""

from __future__ import annotations

import argparse
import time
from typing import Any

from hyper_parallel.cli.arguments import float_range, int_range, seed
from hyper_parallel.cli.output import can_be_written, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import names_of, platforms
from hyper_parallel.cli.verify_ops import operators
from hyper_parallel.platform.select import FRAMEWORKS
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Change sharding rules, one place at a time, and count how many changes the quick sweep notices: a reduction forgotten or
of another kind, a dim shifted, a complete value added on every rank, an operator treated as linear, a condition
dropped, the adapter of the next rank used, a gradient not reduced.

Every operator gives the same number of mutants, shuffled by a seed. A mutant that claims only what the rule claims too
is equivalent, and is not counted. Survivors are listed with the result of the full sweep.

With --source, the library's own code is changed instead: redistribution and the dispatcher. These mutants are checked
by changes of placement, functions on DTensors, scenarios of the dispatcher, and the costs of plans. A change that
nothing can notice is equivalent if a table says why; other survivors are listed. --each 200 runs all mutants.

With --proofs, a mutant is noticed if it breaks the proof of a row. Mutants of rows without a proof are not counted. A
mutant that is still proven counts as a correct rule, unless the quick sweep finds a wrong value: then it has survived.

Exit status: 0 if the score reaches the floor, 1 if not, 2 for invalid input, 130 after Ctrl-C."""
_MOST_MUTANTS = 1_000_000
_EACH = 5  # of every operator, at first; four hundred have a rule


def add_parser(subcommands: Any) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "mutants",
        help="count how many changed rules the verifier notices",
        description=_DESCRIPTION,
    )
    parser.add_argument("--op", nargs="+", metavar="NAME", help="change only the rules of these operators")
    text = "change the library's own code instead: these modules, such as core.shard.dispatch, or all"
    parser.add_argument("--source", nargs="*", metavar="MODULE", help=text)
    text = "check whether each mutant breaks a proof of prove ops, instead of running the quick sweep on it"
    parser.add_argument("--proofs", action="store_true", help=text)
    parser.add_argument("--platform", default="torch", metavar="torch", help="framework of the rules (default: torch)")
    parser.add_argument(
        "--each",
        type=int_range(1, _MOST_MUTANTS),
        default=_EACH,
        metavar="N",
        help=f"mutants per operator (default: {_EACH})",
    )
    parser.add_argument(
        "--wanted",
        type=int_range(0, _MOST_MUTANTS),
        default=0,
        metavar="N",
        help="fail if there are fewer than N mutants in all",
    )
    parser.add_argument(
        "--floor",
        type=float_range(100.0, least=0.0),
        default=99.5,
        metavar="PERCENT",
        help="lowest score that passes (default: 99.5)",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of the order of mutants (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    parser.add_argument("--report", metavar="PATH", help="also write the report to PATH, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the mutants; 0 if enough were noticed."""
    from hyper_parallel.verify.ops.worker_pool import run_tasks
    from workshop.mutation import tasks
    from workshop.mutation.report import MutantResult, Score

    if arguments.proofs and arguments.source is not None:
        msg = "--proofs tests proofs of rules, and --source changes the library's own code; leave out one of them"
        raise ValueError(msg)
    modules = None if arguments.source is None else _modules(arguments)
    platform = _framework(arguments.platform)
    can_be_written("--report", arguments.report)
    tasks_to_run = (
        tasks.mutant_tasks(platform, operators(arguments.op), arguments.each, arguments.seed, proofs=arguments.proofs)
        if modules is None
        else tasks.source_tasks(modules, arguments.each, arguments.seed)
    )
    score = Score(platform, arguments.wanted, arguments.seed)
    progress, started = Progress(sum(len(task["ops"]) for task in tasks_to_run)), time.monotonic()
    try:
        for result in run_tasks(MutantResult, tasks_to_run, lambda _, op: progress.start(op)):
            score.add(result)
            progress.finish()
    except KeyboardInterrupt:
        progress.clear()
        score.interrupted = "interrupted; the other mutants were not run"
        score.seconds = time.monotonic() - started
        _write(arguments, score.json())
        raise KeyboardInterrupt(score.text()) from None
    score.seconds = time.monotonic() - started
    _write(arguments, score.json())
    print_result(report_json(score.json()) if arguments.json else score.text())
    return 0 if score.ok(arguments.floor / 100) else 1


def _framework(asked: str) -> str:
    """Return the one framework whose rules are changed."""
    names = names_of(asked, "--platform", FRAMEWORKS)
    if len(names) > 1:
        msg = f"--platform {asked!r}: mutants run on one framework; give {' or '.join(names)}"
        raise ValueError(msg)
    return platforms(asked)[0]


def _modules(arguments: argparse.Namespace) -> list[str]:
    """Return the full names of the modules that are asked for."""
    from workshop.mutation.suite.checks import MODULE_CHECKS

    if arguments.op:
        msg = "--op selects rules of operators, and --source changes the library's own code; leave out one of them"
        raise ValueError(msg)
    platform = names_of(arguments.platform, "--platform", FRAMEWORKS)[0]
    if platform != "torch":
        msg = f"--source --platform {platform}: both frameworks run the same code, which is mutated on torch only"
        raise ValueError(msg)
    asked = [f"hyper_parallel.{module}" for module in arguments.source]
    for module in asked:
        if module not in MODULE_CHECKS:
            known = ", ".join(known.removeprefix("hyper_parallel.") for known in MODULE_CHECKS)
            msg = f"--source {module.removeprefix('hyper_parallel.')}: this module is not mutated; modules: {known}"
            raise ValueError(msg)
    return asked or list(MODULE_CHECKS)


def _write(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if arguments.report is not None:
        write_text(arguments.report, report_json(report) + "\n", "--report")

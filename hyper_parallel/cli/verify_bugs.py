"""``hyper-parallel verify bugs``: run the corpus of documented bugs through the harness."""

from __future__ import annotations

import argparse
from typing import Any

from hyper_parallel.cli.arguments import add_reports, add_seed
from hyper_parallel.cli.output import can_be_written, coloured, print_report, write_outputs
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import platforms

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Run documented bugs of distributed training through the harness. Each is a small program of plain PyTorch or
MindSpore with a switch between the broken and the fixed form. Both forms are verified as `verify program` verifies a
script: the broken form must differ, the fixed form must be equal. The first wrong value and the cause in the report
are compared with the documented ones.

Exit status: 0 if all bugs were caught and all fixed forms pass; if all bugs ran, the report must also name the right
tensor for 90% of them and the right cause for 80%. 1 if not, 2 for invalid input, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel verify bugs --only average_for_sum",
    "hyper-parallel verify bugs --platform torch --html bugs.html",
)


def add_parser(kinds: Any) -> None:
    """Declare the subcommand."""
    subparser = kinds.add_parser(
        "bugs",
        help="run documented bugs and their fixes, and count which are caught",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/comparison.md",
    )
    subparser.add_argument("--only", action="append", metavar="NAME", help="run only this bug; repeatable")
    subparser.add_argument(
        "--platform", metavar="torch,mindspore", help="frameworks to check (default: those installed)"
    )
    add_seed(subparser, "the perturbations that measure rounding")
    add_reports(subparser, "the verdict and evidence of every bug")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen bugs; return 0 if the report is good."""
    from hyper_parallel.verify.bugs.corpus import run_bug
    from hyper_parallel.verify.bugs.registry import bugs_named
    from hyper_parallel.verify.bugs.results import CorpusReport

    bugs = bugs_named(platforms(arguments.platform), arguments.only)
    for option, path in (("--report", arguments.report), ("--html", arguments.html)):
        can_be_written(option, path)
    report, progress = CorpusReport(whole=not arguments.only), Progress(len(bugs))
    try:
        for bug in bugs:
            with progress.running(f"{bug.name} on {bug.framework}"):
                report.results.append(run_bug(bug, arguments.seed))
            if not arguments.json:
                print(coloured(report.results[-1].text()), flush=True)
    except KeyboardInterrupt:
        progress.clear()
        report.note = f"partial report: {len(report.results)} of {len(bugs)} bugs finished"
        write_outputs(report, arguments)
        raise KeyboardInterrupt(report.text()) from None
    write_outputs(report, arguments)
    print_report(report, as_json=arguments.json, seed=arguments.seed)
    return report.status

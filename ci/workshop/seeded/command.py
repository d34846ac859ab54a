"""``python ci/workshop seeded``: bugs of large models, and whether the models that ``reduce`` makes still show them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hyper_parallel.cli.output import can_be_written, coloured, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text
from workshop.seeded.cases import CASES
from workshop.seeded.measurement import SIZES, Outcome, outcome

__all__ = ["add_parser", "run"]

_SHARE = 0.95
"""Of the bugs found in the full model, the share that the reduced one must show."""
_LINE = "{:<8} {:<42} {:<28} {:<28}"
_DESCRIPTION = f"""\
Verify four configurations, each with one seeded bug at a time, both as they are and reduced by `hyper-parallel reduce`.
The bugs depend on structure: heads, layers of several kinds, experts, stages, tied weights.

Exit status: 0 if the programs without a bug pass and at least {_SHARE:.0%} of the bugs that are found in the full
models are found in the reduced ones, 1 if not, 2 for invalid input."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    text = "count which seeded bugs are found in full models and in reduced ones"
    parser = commands.add_parser("seeded", help=text, description=_DESCRIPTION)
    parser.add_argument(
        "--case", default="", metavar="NAMES", help=f"configurations: {', '.join(CASES)} (default: all)"
    )
    parser.add_argument("--bug", default="", metavar="NAMES", help="bugs, such as tied-not-reduced (default: all)")
    parser.add_argument("--size", choices=SIZES, help="verify only the full or only the reduced models")
    parser.add_argument("--report", metavar="FILE", help="also write the outcomes to FILE, as JSON")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify every case and bug; return 0 if the reduced models show enough of what the full ones show."""
    can_be_written("--report", arguments.report)
    names = _chosen(arguments.case, list(CASES), "--case")
    bugs = _chosen(arguments.bug, [bug for name in names for bug in CASES[name].bugs], "--bug")
    jobs = [(name, bug) for name in names for bug in ("", *CASES[name].bugs) if not bug or bug in bugs]
    sizes = [arguments.size] if arguments.size else SIZES
    progress, outcomes = Progress(len(jobs) * len(sizes)), list[Outcome]()
    for name, bug in jobs:
        row = []
        for size in sizes:
            with progress.running(f"{name}, {bug or 'without a bug'}, {size}"):
                row.append(outcome(name, bug, size))
        outcomes += row
        if not arguments.json:
            print(coloured(_line(row)), flush=True)
    report = _report(outcomes)
    if arguments.report:
        write_text(arguments.report, report_json(report), "--report")
    if arguments.json:
        print_result(report_json(report))
    else:
        print(", ".join(f"{report['found'][size]} of {report['seeded']} bugs found in the {size} models in "
                        f"{report['minutes'][size]:.0f} minutes" for size in sizes))  # fmt: skip
        if missed := report["missed"]:
            print(f"found in the full models only: {', '.join(missed)}")
    return 0 if report["ok"] else 1


def _report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    found = {size: {(each.case, each.bug) for each in outcomes if each.size == size and each.bug and each.as_expected}
             for size in SIZES}  # fmt: skip
    both = {each.size for each in outcomes} == set(SIZES)
    missed = sorted(bug for _, bug in found["full"] - found["reduced"]) if both else []
    right = all(each.as_expected for each in outcomes if not each.bug)
    enough = not both or len(missed) <= (1 - _SHARE) * len(found["full"])
    return {
        "ok": right and enough,
        "seeded": len({(each.case, each.bug) for each in outcomes if each.bug}),
        "found": {size: len(found[size]) for size in SIZES},
        "missed": missed,
        "minutes": {size: sum(each.seconds for each in outcomes if each.size == size) / 60 for size in SIZES},
        "outcomes": [asdict(each) for each in outcomes],
    }


def _line(row: Sequence[Outcome]) -> str:
    cells = [f"{each.size}: {_word(each)}, {each.seconds:.0f} s" for each in row]
    return _LINE.format(row[0].case, row[0].bug or "without a bug", *cells, *[""] * (2 - len(cells))).rstrip()


def _word(each: Outcome) -> str:
    if each.bug:
        return {0: "MISSED", 1: "found"}.get(each.status, f"status {each.status}")
    return "passes" if each.as_expected else f"FAILED: {each.first}"


def _chosen(text: str, known: list[str], option: str) -> list[str]:
    chosen = text.split(",") if text else known
    unknown = [word for word in chosen if word not in known]
    if unknown:
        msg = f"{option} {unknown[0]!r} is not one of {', '.join(known)}"
        raise ValueError(msg)
    return chosen

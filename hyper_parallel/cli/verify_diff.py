"""``hyper-parallel verify diff``: compare any two runs of programs."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.arguments import (
    MOST_STEPS,
    add_declare,
    add_reports,
    add_run_limits,
    add_seed,
    declared_placements,
    int_range,
)
from hyper_parallel.cli.output import can_be_written, print_report
from hyper_parallel.cli.progress import Progress
from hyper_parallel.platform.select import FRAMEWORKS

if TYPE_CHECKING:
    from hyper_parallel.verify.diff.side import DiffSide

__all__ = ["add_parser", "run"]

_RUNS = 6  # A on one rank, two perturbed repeats, the ranks of A, the ranks of B, the comparison

_DESCRIPTION = """\
Run two programs, or one program in two ways, and compare everything that they compute: `verify diff "train.py --tp 2"
"train.py --tp 4" --a-world-size 2 --b-world-size 4`, `verify diff train.py --a-rev HEAD~1`.

A and B are scripts with their arguments, each in one string, or commands: "torchrun --nproc-per-node 2 train.py".
Without B, both are A. The ranks of B are compared with those of A. A also runs on one rank, which locates the shards of
its ranks; repeats of that run, perturbed by one unit in the last place, measure the rounding error.

A or B may be the folder of a recording (hyper-parallel record) or of a dump of Ascend's msprobe. A recording is
compared with another one, or with a program on the same number of simulated ranks. A and B may also both be logs of
PyTorch's DebugMode, in files whose names end in .log or .txt.

The report says first whether initial weights and samples are equal. Then it names the first value that differs, and
whether only the order of sums differs, or the computation.

Exit status: 0 if everything is equal up to rounding, 1 if not, 2 for invalid input, 3 if nothing differs but too few
values could be judged, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel verify diff train.py train.py --a-world-size 2 --b-world-size 4",
    'hyper-parallel verify diff "train.py --lr 0.1" "train.py --lr 0.1 --foreach"',
    "hyper-parallel verify diff train.py --a-rev HEAD~1",
    "hyper-parallel verify diff run1 train.py",
)


def add_parser(kinds: Any) -> None:
    """Declare the subcommand."""
    subparser = kinds.add_parser(
        "diff",
        help="compare any two runs of programs",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/compare-two-runs.md",
    )
    subparser.add_argument(
        "a", metavar="A", help="a script with its arguments in one string, a launcher's command, or a recording"
    )
    subparser.add_argument("b", nargs="?", metavar="B", help="the other run, likewise (default: A)")
    for label in ("a", "b"):
        name = label.upper()
        subparser.add_argument(
            f"--{label}-world-size", type=int_range(1), metavar="N", help=f"number of ranks of {name} (default: 1)"
        )
        subparser.add_argument(
            f"--{label}-launch", default="simulated", metavar="simulated|threads|processes",
            help=f"how ranks of {name} run, as in verify program (default: simulated)",
        )  # fmt: skip
        subparser.add_argument(
            f"--{label}-rev",
            default="",
            metavar="COMMIT",
            help=f"run the files of {name} as they are in this commit",
        )
        subparser.add_argument(
            f"--{label}-platform", choices=FRAMEWORKS, help=f"framework of {name} (default: the one that it imports)"
        )
        subparser.add_argument(
            f"--{label}-python", default="", metavar="PYTHON",
            help=f"interpreter that runs {name} (default: the one of this command)",
        )  # fmt: skip
        subparser.add_argument(
            f"--{label}-mesh", metavar="dp=2,cp=2",
            help=f"names and sizes of the axes of recording {name}, for --declare; the last varies fastest",
        )  # fmt: skip
    subparser.add_argument(
        "--a-single-args", metavar="ARGS", help="arguments of A on one rank, in one string (default: its own)"
    )
    subparser.add_argument(
        "--steps", type=int_range(1, MOST_STEPS), metavar="N", help="stop both after N optimizer steps"
    )
    add_declare(subparser)
    add_seed(subparser, "the perturbations")
    add_run_limits(subparser)
    add_reports(subparser)
    subparser.usage = "hyper-parallel verify diff A [B] [options]"
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare the runs; return 0 if they are equal within rounding."""
    from hyper_parallel.verify.diff.run import verify_diff

    first = _side(arguments, "a", arguments.a)
    second = _side(arguments, "b", arguments.a if arguments.b is None else arguments.b)
    can_be_written("--report", arguments.report)
    progress = Progress(_RUNS)
    try:
        with progress.ticking():
            report = verify_diff(
                first,
                second,
                steps=arguments.steps,
                seed=arguments.seed,
                declared=declared_placements(arguments.declare or ()) or None,
                timeout=arguments.timeout,
                scratch=arguments.scratch,
                budget=None if arguments.budget is None else int(arguments.budget * (1 << 30)),
                progress=progress.next,
            )
    finally:
        progress.clear()
    report.write(arguments.report)
    print_report(report, as_json=arguments.json)
    return report.status


def _side(arguments: argparse.Namespace, label: str, text: str) -> DiffSide:
    """Return run A or B, from its string and the options that begin with its letter."""
    from hyper_parallel.verify.diff.side import DiffSide, side_of

    target, args, ranks = side_of(_words(label.upper(), text), label.upper())
    single = arguments.a_single_args if label == "a" else None
    return DiffSide(
        target,
        args,
        getattr(arguments, f"{label}_world_size") or ranks or 1,
        getattr(arguments, f"{label}_launch"),
        None if single is None else _words("--a-single-args", single),
        getattr(arguments, f"{label}_platform"),
        getattr(arguments, f"{label}_rev"),
        getattr(arguments, f"{label}_python"),
        _mesh(f"--{label}-mesh", getattr(arguments, f"{label}_mesh")),
    )


def _mesh(option: str, text: str | None) -> dict[str, int] | None:
    """Parse the sizes of named axes: ``dp=2,cp=2``."""
    from hyper_parallel.verify.run_arguments import parse_mesh

    if text is None:
        return None
    try:
        sizes, names = parse_mesh(text, None)
    except ValueError as error:
        msg = str(error).replace("--mesh", option)
        raise ValueError(msg) from None
    return dict(zip(names, sizes, strict=True))


def _words(option: str, text: str) -> list[str]:
    """Split one string into arguments, like a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        msg = f"{option} {text!r} cannot be split into arguments: {error}"
        raise ValueError(msg) from None

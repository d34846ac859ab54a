"""``hyper-parallel fuzz``: random programs compared with one device, and reduced where they differ."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hyper_parallel._text import near_hint
from hyper_parallel.cli.arguments import add_reports, add_seed, float_range, int_range
from hyper_parallel.cli.output import can_be_written, print_report, write_outputs
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import platforms
from hyper_parallel.platform.select import platform_named

if TYPE_CHECKING:
    from hyper_parallel.verify.fuzz.campaign import Settings
    from hyper_parallel.verify.fuzz.report import FuzzReport

__all__ = ["add_parser", "run"]

_DEFAULT_COUNT = 1000
_MOST_PROGRAMS = 1_000_000_000
_MOST_MINUTES = 7 * 24 * 60.0
_MOST_JOBS = 256

_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("bfloat16", "float16", "float32", "float64"),
)

_DESCRIPTION = """\
Run random programs on simulated ranks and on a single device, and compare every value and every gradient. A program
chains 3 to 12 operators and modules: the operators' own samples, views, indexing, arithmetic, writes in place,
changes of placement. Meshes have one to three axes and up to eight ranks; inputs are sharded, replicated or partial,
in odd, empty and size-1 dims, and have several dtypes. On PyTorch, gradients come from backward() or autograd.grad, and
some are differentiated again; on MindSpore they come from GradOperation or value_and_grad.

A program is equal, refused (by an error of this library), refused by both, accepted (only the single device
refuses it), wrong, an internal error, or a hang. Programs with one of the last three outcomes are reduced, and written
as programs of plain user code that end with a non-zero status. The same seed and count give the same programs.

Exit status: 0 if programs were compared and nothing was found, 1 if not, 2 for invalid input, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel fuzz --platform torch --count 200",
    "hyper-parallel fuzz --dtypes bool,int8,int32,float16 --count 200",
    "hyper-parallel fuzz --minutes 10 --jobs 4 --findings findings",
)


def add_parser(subcommands: Any) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "fuzz",
        help="compare random programs on DTensors with a single device",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/adding-an-operator.md",
    )
    parser.add_argument("--platform", metavar="FRAMEWORK", help="torch or mindspore (default: those installed)")
    add_seed(parser, "all programs")
    parser.add_argument(
        "--count",
        type=int_range(1, _MOST_PROGRAMS),
        metavar="N",
        help=f"number of programs (default: {_DEFAULT_COUNT})",
    )
    parser.add_argument(
        "--first",
        type=int_range(0, _MOST_PROGRAMS),
        default=0,
        metavar="N",
        help="number of the first program (default: 0)",
    )
    parser.add_argument(
        "--dtypes",
        type=_dtypes,
        default=(),
        metavar="NAME,NAME",
        help=f"mix these dtypes in each program: {', '.join(_DTYPES)} (default: one floating dtype per program)",
    )
    parser.add_argument(
        "--minutes",
        type=float_range(_MOST_MINUTES),
        metavar="M",
        help="stop after M minutes, or when --count is reached",
    )
    parser.add_argument(
        "--jobs", type=int_range(1, _MOST_JOBS), default=1, metavar="N", help="number of processes (default: 1)"
    )
    parser.add_argument(
        "--findings",
        default="fuzz_findings",
        metavar="FOLDER",
        help="folder for programs that fail (default: fuzz_findings)",
    )
    add_reports(parser, "counts, rejections and every finding")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the programs; return 0 if programs of every framework were compared and no defect was found."""
    for option, path in (("--report", arguments.report), ("--html", arguments.html)):
        can_be_written(option, path)
    from hyper_parallel.verify.fuzz.campaign import run_campaign

    settings = _settings(arguments)
    progress = Progress(settings.count or 0)

    def show(report: FuzzReport) -> None:
        progress.done = report.programs
        progress.start(f"{len(report.findings)} findings")

    report = run_campaign(settings, show)
    progress.clear()
    write_outputs(report, arguments)
    if report.note:
        raise KeyboardInterrupt(report.text())
    print_report(report, as_json=arguments.json)
    return report.status


def _settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the run.

    Raises:
        ValueError: a framework is not supported.
    """
    from hyper_parallel.verify.fuzz.campaign import Settings
    from hyper_parallel.verify.fuzz.language import LANGUAGES, language_of

    frameworks = platforms(arguments.platform)
    if arguments.platform is None:
        frameworks = [framework for framework in frameworks if framework in LANGUAGES] or frameworks
    for framework in frameworks:
        platform_named(framework)  # raises if the framework cannot be imported
        language_of(framework)
    count = _DEFAULT_COUNT if arguments.count is None and arguments.minutes is None else arguments.count
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    can_be_written("--findings", arguments.findings, folder=True)
    return Settings(
        *(tuple(frameworks), arguments.seed, count, seconds, arguments.jobs, arguments.findings, arguments.first),
        arguments.dtypes,
    )


def _dtypes(text: str) -> tuple[str, ...]:
    """Return the names of a list such as ``bool,int32``.

    Raises:
        argparse.ArgumentTypeError: a name is not a dtype.
    """
    names = tuple(text.split(","))
    for name in names:
        if name not in _DTYPES:
            shown = repr(name) if name else "an empty name"
            msg = f"{shown} is none of {', '.join(_DTYPES)}{near_hint(name, _DTYPES)}"
            raise argparse.ArgumentTypeError(msg)
    return names

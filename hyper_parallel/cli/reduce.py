"""``hyper-parallel reduce``: the smallest configuration with the structure of a large one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hyper_parallel.cli.arguments import float_range
from hyper_parallel.cli.output import can_be_written, print_report
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.report_files import write_text

__all__ = ["add_parser", "run"]

_MOST_SECONDS = 86400.0
_MOST_RANKS = 1 << 20

_DESCRIPTION = """\
Write the smallest configuration with the structure of CONFIG, for verification on this machine: ratios of heads,
experts and top-k, kinds of layers, divisibility by the axes of the mesh, the order of widths. Sizes that differ in
CONFIG also differ in the result. The report lists what was kept, what has changed and the blind spots of the small
case.

CONFIG is a Hugging Face config (.json), a TOML of torchtitan, arguments of Megatron (a file or a shell script) or a
YAML of MindFormers; the result has the same format. Axes of the mesh that CONFIG does not name are taken
from --mesh; the report says which axes are assumed to be 2.

Exit status: 0 if the estimated time is within --budget, 1 if it is not, 2 for invalid input, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel reduce config.json --mesh pp=4,dp=8,tp=8 -o small.json",
    "hyper-parallel reduce pretrain.sh --mesh dp=16 -o small.sh --budget 60",
)


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "reduce",
        help="write the smallest configuration with the structure of a large one",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/reduce.md",
    )
    parser.add_argument("config", metavar="CONFIG", help="configuration of the large model")
    parser.add_argument("-o", "--output", metavar="FILE", help="file of the small configuration")
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    parser.add_argument("--mesh", metavar="pp=4,tp=8", help="axes of the large run: tp, pp, cp, ep, dp")
    parser.add_argument(
        "--budget",
        type=float_range(_MOST_SECONDS),
        default=120.0,
        metavar="SECONDS",
        help="maximum estimated time of a verification of three steps (default: 120)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the small configuration; return 0 if its estimated time is within the budget.

    Raises:
        InputError: (a ValueError) the configuration cannot be reduced, or the file exists.
    """
    from hyper_parallel.verify.reduce.document import read_document
    from hyper_parallel.verify.reduce.reduction import reduce_document
    from hyper_parallel.verify.reduce.report import ReductionReport

    path, output = Path(arguments.config), arguments.output
    can_be_written("-o", output)
    if output is not None and Path(output).exists():
        if path.exists() and path.samefile(output):
            msg = f"-o {output} would overwrite CONFIG; name another file"
            raise InputError(msg)
        if not arguments.force:
            msg = f"-o {output} exists; add --force to overwrite it"
            raise InputError(msg)
    reduction = reduce_document(read_document(path), _axes(arguments.mesh))
    if output is not None:
        write_text(output, reduction.text, "-o")
    report = ReductionReport(reduction, arguments.budget, output)
    print_report(report, as_json=arguments.json)
    return report.status


def _axes(mesh: str | None) -> dict[str, int]:
    """Return the axes of ``--mesh``.

    Raises:
        InputError: (a ValueError) ``mesh`` is not a mesh, or has an axis with an unknown name.
    """
    from hyper_parallel.verify.reduce.keys import AXES
    from hyper_parallel.verify.run_arguments import parse_mesh

    if mesh is None:
        return {}
    shape, names = parse_mesh(mesh, None, _MOST_RANKS)
    for name in names:
        if name not in AXES:
            msg = f"--mesh {mesh!r}: axis {name!r} is unknown; axes are {', '.join(AXES)}"
            raise InputError(msg)
    return dict(zip(names, shape, strict=True))

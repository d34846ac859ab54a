"""``hyper-parallel verify redistribute``: check every redistribution."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from hyper_parallel.cli.arguments import add_device, add_seed
from hyper_parallel.cli.output import coloured, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import platforms
from hyper_parallel.cli.verify_ops import meshes_of
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.report import report_json

if TYPE_CHECKING:
    from typing import Any

    from hyper_parallel.verify.checker.redistribution import RedistributionReport

__all__ = ["add_parser", "run"]

_MOST_DIMS, _MOST_ELEMENTS, _DIGITS = 6, 1_000_000, 7

_DESCRIPTION = """\
Redistribute a tensor from every placement to every placement on simulated ranks. Values and gradients are compared
with a single device, and the number of received elements with the minimum that any algorithm needs.

Exit status: 0 if every supported change of placement passed, 1 if not, 2 for invalid input, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel verify redistribute --quick",
    "hyper-parallel verify redistribute --mesh 2x3 --shape 7x5 --platform torch",
)


def add_parser(kinds: Any) -> None:
    """Declare the subcommand."""
    subparser = kinds.add_parser(
        "redistribute",
        help="check every change of placement: values, gradients and bytes",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/proofs.md",
    )
    subparser.add_argument(
        "--platform", metavar="torch,mindspore", help="frameworks to check (default: those installed)"
    )
    add_device(subparser, "device of all ranks")
    subparser.add_argument("--mesh", metavar="3,2x3", help="check only on these meshes (default: 2,3,4,2x2,2x3)")
    subparser.add_argument("--shape", metavar="7x5", help="global shape of the tensor (default: 7x5)")
    subparser.add_argument("--quick", action="store_true", help="check only on meshes 2, 3 and 2x2")
    add_seed(subparser, "values and gradients")
    subparser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check every mesh on every framework; return 0 if all passed."""
    from hyper_parallel.verify.checker.redistribution import MESHES, QUICK_MESHES, SHAPE, verify_redistribution

    if arguments.quick and arguments.mesh is not None:
        msg = "--quick chooses the meshes; leave out --quick or --mesh"
        raise ValueError(msg)
    meshes: tuple[tuple[int, ...], ...] = QUICK_MESHES if arguments.quick else MESHES
    if arguments.mesh is not None:
        meshes = meshes_of(arguments.mesh)
    shape = SHAPE if arguments.shape is None else _shape(arguments.shape)
    jobs = [(platform, mesh) for platform in platforms(arguments.platform, arguments.device) for mesh in meshes]
    done: list[RedistributionReport] = []
    progress = Progress(len(jobs))
    try:
        for platform, mesh in jobs:
            with progress.running(f"{'x'.join(map(str, mesh))} on {platform}"):
                done.append(verify_redistribution(platform, mesh, shape, seed=arguments.seed, device=arguments.device))
            if not done[-1].ok:
                platform_named(platform)  # raises if the framework cannot be imported
            if not arguments.json:
                print(coloured(done[-1].text()), flush=True)
    except KeyboardInterrupt:
        progress.clear()
        line = f"partial report: {len(done)} of {len(jobs)} meshes finished; the rest was not verified"
        raise KeyboardInterrupt(line) from None
    if not arguments.json:
        print(f"seed {arguments.seed}")
    ok = bool(done) and all(report.ok for report in done)
    if arguments.json:
        print_result(report_json({"ok": ok, "runs": [report.json() for report in done]}))
    return 0 if ok else 1


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.strip().split("x")
    if not all(size.isascii() and size.isdecimal() for size in sizes):
        msg = f"--shape {text!r} must look like 7x5"
        raise ValueError(msg)
    if len(sizes) > _MOST_DIMS or max(map(len, sizes)) > _DIGITS or math.prod(map(int, sizes)) > _MOST_ELEMENTS:
        msg = f"--shape {text!r} is too large; there can be at most {_MOST_DIMS} dims and {_MOST_ELEMENTS} elements"
        raise ValueError(msg)
    if math.prod(map(int, sizes)) == 0:
        msg = f"--shape {text!r} has no element, so nothing would be compared"
        raise ValueError(msg)
    return tuple(map(int, sizes))

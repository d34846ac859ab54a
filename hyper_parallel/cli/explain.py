"""``hyper-parallel explain``: print what a plan shards and communicates on a mesh of any size."""

from __future__ import annotations

import argparse
from typing import Any

from hyper_parallel.cli.arguments import add_device, whole
from hyper_parallel.cli.cards import require_settings
from hyper_parallel.cli.colour import coloured
from hyper_parallel.cli.progress import Progress
from hyper_parallel.verify.run_header import report_json

__all__ = ["add_parser", "run"]

_MOST_RANKS = 65536

_DESCRIPTION = """\
Print what a parallel plan does in one training step on a mesh of up to 65536 ranks: how each parameter is sharded,
which collectives run in which module, and how many bytes the busiest rank receives. This process acts as rank 0;
nothing is communicated or compared.

SPEC and PLAN are those of hyper-parallel verify model. On PyTorch tensors have
shapes and no values, so the size of the model does not matter; a program that reads values is run with them, up to
4 GiB of parameters. On MindSpore this process builds the whole model. With --device cuda or npu the step runs on a
card, with values, and the most bytes that it takes there are shown.

Exit status: 0 on success, 2 for invalid input, 130 after Ctrl-C."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    subparser = commands.add_parser(
        "explain",
        help="what a plan shards and communicates, on a mesh of any size",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparser.add_argument("spec", metavar="SPEC", help="the model")
    subparser.add_argument("--plan", required=True, metavar="PLAN", help="its parallel plan")
    subparser.add_argument("--world-size", type=whole(1), metavar="N", help="number of ranks")
    subparser.add_argument("--mesh", metavar="64x8", help="axes: 3 is tp, 64x8 is dp by tp, dp=64,tp=8 names them")
    subparser.add_argument("--platform", metavar="torch,mindspore", help="default: what SPEC imports")
    add_device(subparser, "on which the step runs with values, so that its memory is measured")
    subparser.add_argument("--json", action="store_true", help="as JSON")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Explain the plan on each framework."""
    from hyper_parallel.cli.verify_model import user_platforms
    from hyper_parallel.verify.explain import Explanation, explain_model
    from hyper_parallel.verify.run_arguments import parse_mesh

    require_settings(arguments.device)
    shape, names = parse_mesh(arguments.mesh, arguments.world_size, _MOST_RANKS)
    frameworks = user_platforms(arguments)
    progress, explanations = Progress(len(frameworks)), list[Explanation]()
    try:
        with progress.ticking():
            for platform in frameworks:
                progress.next(f"{arguments.spec} on {platform}")
                explanations.append(
                    explain_model(
                        arguments.spec, arguments.plan, shape, names, platform=platform, device=arguments.device
                    )
                )
    finally:
        progress.clear()
    if arguments.json:
        print(report_json([explanation.json() for explanation in explanations]))
    else:
        print(coloured("\n\n".join(explanation.text() for explanation in explanations)))
    return 0

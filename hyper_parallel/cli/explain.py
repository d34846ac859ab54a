"""``hyper-parallel explain``."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Say what a parallel plan will do in one training step, for a mesh of any size: what is sharded how, which collectives
run where, and how many bytes the worst rank receives. One process plays rank 0; nothing is communicated or compared.

SPEC and PLAN are those of hyper-parallel verify model. The model is built whole, in this process.

Exit status: 0 if it was explained, 2 for input that makes no sense, 130 after Ctrl-C."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    one = commands.add_parser(
        "explain",
        help="what a plan shards and communicates, on a mesh of any size",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("spec", metavar="SPEC", help="the model")
    one.add_argument("--plan", required=True, metavar="PLAN", help="its parallel plan")
    one.add_argument("--world-size", type=int, metavar="N", help="number of ranks")
    one.add_argument("--mesh", metavar="64x8", help="axes: 3 is tp, 64x8 is dp by tp, dp=64,tp=8 names them")
    one.add_argument("--platform", metavar="torch,mindspore", help="default: what SPEC imports")
    one.add_argument("--json", action="store_true", help="as JSON")
    one.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Explain on each framework."""
    from hyper_parallel.cli.verify_model import user_platforms
    from hyper_parallel.verify.explain import explain_model
    from hyper_parallel.verify.model import parse_mesh

    shape, names = parse_mesh(arguments.mesh, arguments.world_size)
    found = [
        explain_model(arguments.spec, arguments.plan, shape, names, platform=platform)
        for platform in user_platforms(arguments)
    ]
    if arguments.json:
        print(json.dumps([one.json() for one in found], indent=2))
    else:
        print("\n\n".join(one.text() for one in found))
    return 0

"""``hyper-parallel prove``: what holds for every size, of operators and of a plan."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.output import can_be_written, print_report
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_ops import operators
from hyper_parallel.platform.select import require_framework

if TYPE_CHECKING:
    from hyper_parallel.verify.prove.report import ProofReport

__all__ = ["add_parser", "run_ops"]

_PROVE = "Prove what holds for every size and every number of ranks, without running ranks."

_EXAMPLES = ("hyper-parallel prove ops", "hyper-parallel prove ops --op linear softmax")

_OPS = """\
Prove the rows of every sharding rule for all sizes and numbers of ranks. An operator and its backward are decomposed
into primitives over symbolic sizes (PyTorch's decompositions; the rows are those of both frameworks), and a row is
proven if the laws of the primitives lead from the placements of the operands to those of the results and gradients,
under no other conditions on sizes than the row asks for. A row that no law proves is tested on small sizes; what
cannot be tested either is assumed, with the reason.

Exit status: 0 if no row is refuted by a test, 1 if one is, 2 for invalid input, 130 after Ctrl-C."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    prove = commands.add_parser(
        "prove", help="prove what holds for every size", description=_PROVE, examples=_EXAMPLES, guide="docs/proofs.md"
    )
    kinds = prove.add_subparsers(required=True, metavar="WHAT")
    ops = kinds.add_parser(
        "ops",
        help="prove the rows of sharding rules for all sizes and numbers of ranks",
        description=_OPS,
        examples=_EXAMPLES,
        guide="docs/proofs.md",
    )
    ops.add_argument("--op", nargs="+", metavar="NAME", help="prove only these operators, and list every row")
    ops.add_argument("--json", action="store_true", help="print the report as JSON")
    ops.add_argument("--report", metavar="PATH", help="also write the report here; JSON if PATH ends in .json")
    ops.set_defaults(run=run_ops)


def run_ops(arguments: argparse.Namespace) -> int:
    """Prove or test every row; 0 if none is refuted."""
    can_be_written("--report", arguments.report)
    require_framework("torch")
    report = _proven(operators(arguments.op), detailed=arguments.op is not None)
    report.write(arguments.report)
    print_report(report, as_json=arguments.json)
    return report.status


def _proven(ops: list[str], *, detailed: bool) -> ProofReport:
    from hyper_parallel.core.shard.rule import Decomposition, find_rule
    from hyper_parallel.platform.select import current_platform, use_platform
    from hyper_parallel.verify.prove.operators import prove_operator
    from hyper_parallel.verify.prove.report import ProofReport

    report, progress = ProofReport(detailed=detailed), Progress(len(ops))
    with use_platform("torch"):
        for op in ops:
            with progress.running(op):
                if isinstance(find_rule(op), Decomposition):
                    report.composed.append(op)
                else:
                    report.rows += prove_operator(current_platform(), op)
    progress.clear()
    sys.stdout.flush()
    return report

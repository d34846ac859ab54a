"""``hyper-parallel prove``: prove operators, redistributions and a plan for every size."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.arguments import add_reports, int_range
from hyper_parallel.cli.output import can_be_written, print_report
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_ops import operators
from hyper_parallel.platform.select import require_framework

if TYPE_CHECKING:
    from hyper_parallel.verify.prove.report import ProofReport

__all__ = ["add_parser", "run_ops", "run_plan", "run_redistributions"]

_PROVE = "Prove sharding rules and redistributions for every size and number of ranks, and certify plans; no rank runs."

_OF_OPS = ("hyper-parallel prove ops", "hyper-parallel prove ops --op linear softmax")
_OF_PLANS = (
    "hyper-parallel prove plan my_model.py:case --plan my_model.py:plan --mesh dp=64,tp=8",
    "hyper-parallel prove plan my_model.py:case --plan my_model.py:plan --mesh 8 --json",
)
_EXAMPLES = (*_OF_OPS, _OF_PLANS[0])

_PLAN = """\
Certify a parallel plan of a PyTorch model on a mesh of up to 65536 ranks, without starting them. One step runs on
tensors without values, as the first rank. Every operator's placements on every axis are proven for these sizes, by the
laws of prove ops, or listed as tested; the report also lists where pending sums and gradients are reduced, and what no
proof covers.

No certificate is issued, and the module is named, if a pending sum is passed on as a plain tensor, the layout of a
gradient differs from that of its parameter, or a gradient to which several ranks contribute is not reduced. The step
also runs as one device: losses, gradients and new weights of both runs must be the same expressions.

Exit status: 0 with a certificate, 1 if something differs from one device, 2 for invalid input, 3 if nothing is refuted,
but something is not covered, 130 after Ctrl-C."""

_MOST_RANKS = 65536

_OPS = """\
Prove every row of every sharding rule for all sizes and numbers of ranks; a row is one combination of placements of the
operands and results. PyTorch's decompositions split an operator and its backward into primitives over symbolic sizes. A
row is proven if the laws of the primitives lead from the placements of the operands to those of the results and
gradients. Local sizes that a proof does not cover are printed. The rows are those of both frameworks.

A row that no law proves is tested on small sizes; a row that cannot be tested either is assumed, and the reason is
printed.

Exit status: 0 if no row is refuted by a test, 1 if one is, 2 for invalid input, 130 after Ctrl-C."""

_REDISTRIBUTIONS = """\
Check the steps of every change of placement, and of its gradient, between all layouts on meshes of up to eight ranks,
with the axes that split a dim in any order. A collective is proven by a law for every size and number of ranks. An
exchange of boxes (blocks of the tensor, one index range per dim) is checked at the listed sizes, on all ranks: every
element of a target box arrives once, from a rank that has it, and each partial value of a sum is counted once. How
steps pack tensors is tested by verify redistribute.

Exit status: 0 if no step is wrong, 1 if one is, 2 for invalid input, 130 after Ctrl-C."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    prove = commands.add_parser(
        "prove",
        help="prove sharding rules for every size, and certify plans",
        description=_PROVE,
        examples=_EXAMPLES,
        guide="docs/proofs.md",
    )
    kinds = prove.add_subparsers(required=True, metavar="WHAT")
    ops = kinds.add_parser(
        "ops",
        help="prove the rows of sharding rules for all sizes and numbers of ranks",
        description=_OPS,
        examples=_OF_OPS,
        guide="docs/proofs.md",
    )
    ops.add_argument("--op", nargs="+", metavar="NAME", help="prove only these operators, and list every row")
    add_reports(ops)
    ops.set_defaults(run=run_ops)
    moves = kinds.add_parser(
        "redistributions",
        help="prove the steps between all layouts",
        description=_REDISTRIBUTIONS,
        examples=(
            "hyper-parallel prove redistributions",
            "hyper-parallel prove redistributions --report steps.json",
        ),
        guide="docs/proofs.md",
    )
    moves.add_argument("--json", action="store_true", help="print the report as JSON")
    moves.add_argument("--report", metavar="PATH", help="also write the report to PATH, as JSON if it ends in .json")
    moves.set_defaults(run=run_redistributions)
    plan = kinds.add_parser(
        "plan",
        help="certify a plan on a mesh of any size",
        description=_PLAN,
        examples=_OF_PLANS,
        guide="docs/proofs.md",
    )
    plan.add_argument("spec", metavar="SPEC", help="function that returns the model, its batches and its loss")
    plan.add_argument("--plan", required=True, metavar="PLAN", help="function that returns a parallel plan")
    plan.add_argument("--world-size", type=int_range(1), metavar="N", help="number of ranks")
    plan.add_argument("--mesh", metavar="64x8", help="shape of the mesh: 3 is tp=3, 64x8 is dp=64,tp=8")
    plan.add_argument("--json", action="store_true", help="print the certificate as JSON on stdout")
    plan.add_argument(
        "--report", metavar="PATH", help="also write the certificate to PATH, as JSON if it ends in .json"
    )
    plan.set_defaults(run=run_plan)


def run_ops(arguments: argparse.Namespace) -> int:
    """Prove or test every row (combination of placements) of the rules; return 0 if none is refuted."""
    can_be_written("--report", arguments.report)
    require_framework("torch")
    report = _proven(operators(arguments.op), detailed=arguments.op is not None)
    report.write(arguments.report)
    print_report(report, as_json=arguments.json)
    return report.status


def run_redistributions(arguments: argparse.Namespace) -> int:
    """Check the redistribution steps between all pairs of layouts; return 0 if none is wrong."""
    from hyper_parallel.verify.prove.redistributions import CASES, prove_redistributions

    can_be_written("--report", arguments.report)
    progress = Progress(len(CASES))
    report = prove_redistributions(CASES, progress.running)
    progress.clear()
    report.write(arguments.report)
    print_report(report, as_json=arguments.json)
    return report.status


def run_plan(arguments: argparse.Namespace) -> int:
    """Certify a plan; return 0 with a certificate, 1 if the plan is refuted, 3 if the result is inconclusive."""
    from hyper_parallel.verify.prove.plan import certify
    from hyper_parallel.verify.run_arguments import parse_mesh

    can_be_written("--report", arguments.report)
    require_framework("torch")
    shape, names = parse_mesh(arguments.mesh, arguments.world_size, _MOST_RANKS)
    certificate = certify(arguments.spec, arguments.plan, shape, names, name=arguments.spec)
    certificate.write(arguments.report)
    print_report(certificate, as_json=arguments.json)
    return certificate.status


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

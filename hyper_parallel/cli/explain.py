"""``hyper-parallel explain``: print what a plan shards and communicates on a mesh of any size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.arguments import add_device, int_range
from hyper_parallel.cli.devices import require_settings
from hyper_parallel.cli.output import can_be_written, coloured, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

if TYPE_CHECKING:
    from hyper_parallel.verify.explanation import Explanation

__all__ = ["add_parser", "run"]

_MOST_RANKS = 65536

_DESCRIPTION = """\
Print what a parallel plan does in one training step on a mesh of up to 65536 ranks: how each parameter is sharded,
how much memory a rank needs, which collectives run in which module, how many bytes the busiest rank receives and how
long that takes. One process computes the first and the last rank; nothing is communicated or compared. Repeated
layers are folded into one row. With several --plan the plans are ranked by the time of their collectives.

Times assume that collectives do not overlap. An axis has the bandwidth and the latency that --link gives it;
by default 200 GB/s and 5 us if its ranks are within eight consecutive ones, else 25 GB/s and 15 us.

SPEC and PLAN are those of hyper-parallel verify model. On PyTorch, tensors have shapes but no values, so the model
may have any size; a program that reads values runs with values, up to 4 GiB of parameters. On MindSpore, this
process builds the complete model. With --device cuda or npu, the step of the first rank runs on the device with
values, and its peak memory is printed.

Exit status: 0 on success, 1 if gradients or the order of collectives are wrong, 2 for invalid input, such as a plan
with which the model cannot run, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel explain my_model.py:case --plan my_model.py:plan --mesh 64x8",
    "hyper-parallel explain my_model.py:case --plan my_model.py:plan --mesh dp=4,tp=2 --link tp=300,4",
)


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    subparser = commands.add_parser(
        "explain",
        help="print what a plan shards and communicates on a mesh of any size",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/two-axes.md",
    )
    subparser.add_argument("spec", metavar="SPEC", help="function that returns the model, its batches and its loss")
    subparser.add_argument(
        "--plan",
        required=True,
        action="append",
        metavar="PLAN",
        help="function that returns a parallel plan; repeatable",
    )
    subparser.add_argument("--world-size", type=int_range(1), metavar="N", help="number of ranks")
    subparser.add_argument("--mesh", metavar="64x8", help="shape of the mesh: 3 is tp=3, 64x8 is dp=64,tp=8")
    subparser.add_argument(
        "--platform", metavar="torch,mindspore", help="frameworks (default: the one that SPEC imports)"
    )
    subparser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="tp=300,4",
        help="bandwidth (GB/s) and latency (microseconds) of an axis; repeatable",
    )
    subparser.add_argument("--html", metavar="FILE", help="also write a page with pictures of the mesh and the shards")
    add_device(subparser, "run the step on this device with values, and measure its memory")
    subparser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Explain the plans on each framework."""
    from hyper_parallel.cli.verify_model import user_platforms
    from hyper_parallel.verify.run_arguments import parse_mesh

    can_be_written("--html", arguments.html)
    require_settings(arguments.device)
    shape, names = parse_mesh(arguments.mesh, arguments.world_size, _MOST_RANKS)
    explanations: list[Explanation] = []
    failed: list[str] = []
    frameworks = user_platforms(argparse.Namespace(**{**vars(arguments), "plan": arguments.plan[0]}))
    progress = Progress(len(frameworks) * len(arguments.plan))
    try:
        with progress.ticking():
            for platform in frameworks:
                own, errors = _of_platform(arguments, platform, shape, names, progress)
                explanations += own
                failed += errors
    finally:
        progress.clear()
    if arguments.html is not None:
        from hyper_parallel.verify.pages.explain_page import explain_page

        write_text(arguments.html, explain_page(explanations, failed), "--html")
    if arguments.json:
        print_result(report_json([explanation.json() for explanation in explanations]))
    else:
        print(coloured("\n\n".join([*_ranked(explanations), *(each.text() for each in explanations)])))
    for line in failed:
        print(line, file=sys.stderr)
    return 2 if failed else int(any(explanation.wrong for explanation in explanations))


def _of_platform(
    arguments: argparse.Namespace, platform: str, shape: tuple[int, ...], names: tuple[str, ...], progress: Progress
) -> tuple[list[Explanation], list[str]]:
    """Return the ranked explanations of one framework, and the plans that could not be explained.

    Raises:
        ValueError: the only plan is invalid.
        NotImplementedError: the only plan depends on data of other ranks.
    """
    from hyper_parallel.verify.explain import explain_model
    from hyper_parallel.verify.explanation import ranking
    from hyper_parallel.verify.prove.table import proven_calls, rows_of_call

    explanations, errors = [], []
    for plan in arguments.plan:
        progress.next(f"{arguments.spec} on {platform}")
        name = arguments.spec if len(arguments.plan) == 1 else f"{arguments.spec} with plan {plan}"
        try:
            explanation = explain_model(
                arguments.spec, plan, shape, names, platform=platform, name=name, links=tuple(arguments.link),
                device=arguments.device,
            )  # fmt: skip
            proofs = proven_calls(platform, map(rows_of_call, explanation.plans))
            explanations.append(replace(explanation, proofs=proofs))
        except (ValueError, NotImplementedError) as error:
            if len(arguments.plan) == 1:
                raise
            errors.append(f"hyper-parallel: error: plan {plan} on {platform} is not explained: {error}")
    return ranking(explanations), errors


def _ranked(explanations: Sequence[Explanation]) -> list[str]:
    """Return the tables that compare the plans of one framework."""
    from hyper_parallel.verify.explanation import ranking_text

    platforms = dict.fromkeys(explanation.platform for explanation in explanations)
    groups = [[each for each in explanations if each.platform == platform] for platform in platforms]
    return [ranking_text(group) for group in groups if len(group) > 1]

"""``python ci/workshop contract``: check every member of the platform contract."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.arguments import add_device, int_range, seed
from hyper_parallel.cli.output import can_be_written, coloured, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.cli.verify_model import names_of, platforms
from hyper_parallel.verify.report import report_json
from workshop.conformance.inventory import MEMBERS

if TYPE_CHECKING:
    from workshop.conformance.results import ContractOutcome, Footprint

__all__ = ["add_parser", "run"]

_LAUNCHES = ("simulated", "processes")
_MOST_RANKS = 64
_DESCRIPTION = """\
Check every member of the platform contract and its documented errors on every rank of a world: collectives and their
gradients, groups, checkpoints, delayed parameters, memory and the rest. A member that a framework or device does not
support must raise the error listed in its gap ledger. An unlisted gap fails the run, and so does a listed gap whose
member works.

Exit status: 0 if everything was checked and passed, 1 if not, 2 for invalid input, 130 after Ctrl-C."""


def add_parser(kinds: Any) -> None:
    """Declare the subcommand."""
    subparser = kinds.add_parser(
        "contract",
        help="check every member that a framework's platform must serve",
        description=_DESCRIPTION,
    )
    subparser.add_argument(
        "--platform", metavar="torch,mindspore", help="frameworks to check (default: those installed)"
    )
    subparser.add_argument(
        "--launch", default="simulated", metavar="simulated,processes", help="how ranks run (default: simulated)"
    )
    add_device(subparser, "device of the tensors: simulated ranks share one, processes have one each")
    subparser.add_argument(
        "--world-size",
        type=int_range(2, _MOST_RANKS),
        default=3,
        metavar="N",
        help="number of ranks, at least 2 (default: 3)",
    )
    subparser.add_argument("--facet", metavar="tensors,groups", help="check only these facets of the contract")
    subparser.add_argument(
        "--memory",
        action="store_true",
        help="also measure checkpointing, swapping and building",
    )
    subparser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of the data of all ranks (default: 0)"
    )
    subparser.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    subparser.add_argument(
        "--report", metavar="FOLDER", help="also write a JSON file per result to FOLDER, for coverage html"
    )
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every check; return 0 if all held."""
    from workshop.conformance.results import examine, measure

    facets = names_of(arguments.facet, "--facet", tuple(MEMBERS)) if arguments.facet is not None else list(MEMBERS)
    launches = names_of(arguments.launch, "--launch", _LAUNCHES)
    can_be_written("--report", arguments.report, folder=True)
    ranks = None if "simulated" in launches else arguments.world_size
    frameworks = platforms(arguments.platform, arguments.device, ranks)

    def given(platform: str, launch: str) -> tuple[Any, ...]:
        return platform, arguments.world_size, launch, facets, arguments.seed, arguments.device

    jobs: list[tuple[str, Any, tuple[Any, ...]]] = [
        (f"{platform} ({launch})", examine, given(platform, launch)) for platform in frameworks for launch in launches
    ]
    if arguments.memory:
        jobs += [(f"memory on {platform}", measure, (platform,)) for platform in frameworks]
    done: list[ContractOutcome | Footprint] = []
    try:
        _run_jobs(jobs, arguments, done)
    except KeyboardInterrupt:
        line = f"partial: {len(done)} of {len(jobs)} parts finished; the rest was not checked"
        raise KeyboardInterrupt(line) from None
    if arguments.json:
        print_result(
            report_json({"ok": all(result.ok for result in done), "results": [asdict(result) for result in done]})
        )
    else:
        print(f"seed {arguments.seed}")
    return 0 if all(result.ok for result in done) else 1


def _run_jobs(
    jobs: Sequence[tuple[str, Any, tuple[Any, ...]]],
    arguments: argparse.Namespace,
    done: list[ContractOutcome | Footprint],
) -> None:
    """Run the jobs in order; print and write each result when it is there."""
    progress = Progress(len(jobs))
    try:
        for name, job, job_arguments in jobs:
            with progress.running(name):
                done.append(job(*job_arguments))
            if arguments.report is not None:
                done[-1].write(Path(arguments.report))
            if not arguments.json:
                print(coloured(done[-1].text()), flush=True)
    finally:
        progress.clear()

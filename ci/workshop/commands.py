"""The commands of the workshop, with the options and exit statuses of ``hyper-parallel``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hyper_parallel.cli import execute
from hyper_parallel.cli.arguments import Parser
from workshop.bench import command as bench
from workshop.conformance import command as contract
from workshop.coverage import command as coverage
from workshop.mutation import command as mutants
from workshop.nights import command as trend
from workshop.program_costs import command as cost
from workshop.proofs import command as proofs
from workshop.seeded import command as seeded
from workshop.self_test import command as self_test

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, as :func:`hyper_parallel.cli.main` does."""
    return execute(parser(), sys.argv[1:] if argv is None else argv)


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="python ci/workshop", description="Measure and check this library, from a checkout.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for command in (bench, contract, cost, coverage, mutants, proofs, seeded, self_test, trend):
        command.add_parser(commands)
    return top

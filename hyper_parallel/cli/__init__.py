"""The command ``hyper-parallel``: what can be known about a parallel plan before it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from hyper_parallel.cli import (
    bench,
    coverage,
    doctor,
    explain,
    self_test,
    verify_contract,
    verify_model,
    verify_mutants,
    verify_ops,
    verify_redistribute,
)
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.transport.out_of_memory import advice

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the number of the signal."""

_BAD_INPUT = 2
_NOT_CHECKED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status.

    0: everything that was claimed was checked and held. 1: it was checked and did not hold, or could not be checked,
    as where there is no memory for another rank. 2: the input makes no sense. 130: Ctrl-C.
    """
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as stopped:
        _tell(arguments, str(stopped) or "interrupted before anything was finished", "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, HyperParallelError, ImportError, MemoryError) as error:
        told = f"{type(error).__name__}: {error}" if isinstance(error, MemoryError) else str(error)
        short = advice(told)
        _tell(arguments, told if short in told else f"{told}\n{short}", "error")
        return _NOT_CHECKED if short else _BAD_INPUT
    return status


def parser() -> argparse.ArgumentParser:
    """Every subcommand with its options."""
    top = argparse.ArgumentParser(prog="hyper-parallel", description="Prove a parallel plan on this machine.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="compare parallel runs with single-device ones")
    kinds = verify.add_subparsers(required=True, metavar="WHAT")
    verify_model.add_parser(kinds)
    verify_ops.add_parser(kinds)
    verify_redistribute.add_parser(kinds)
    verify_mutants.add_parser(kinds)
    verify_contract.add_parser(kinds)
    bench.add_parser(commands)
    coverage.add_parser(commands)
    doctor.add_parser(commands)
    explain.add_parser(commands)
    self_test.add_parser(commands)
    return top


def _tell(arguments: argparse.Namespace, text: str, what: str) -> None:
    """One message: on stderr, and as JSON where that was asked for."""
    print(f"hyper-parallel: {what}: {text}", file=sys.stderr)
    if getattr(arguments, "json", False):
        print(json.dumps({"ok": False, what: text}))

"""The command ``hyper-parallel``: parse arguments, run a subcommand, turn errors into exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel._release import __version__
from hyper_parallel.cli import (
    compare,
    completion,
    doctor,
    explain,
    fuzz,
    prove,
    record,
    reduce,
    reports,
    trace,
    verify_bugs,
    verify_diff,
    verify_model,
    verify_ops,
    verify_program,
    verify_redistribute,
    verify_suite,
)
from hyper_parallel.cli.arguments import Parser, UsageError
from hyper_parallel.cli.output import check_distinct_outputs, coloured, logs_to_stderr
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.transport.failures import advice
from hyper_parallel.verify.report import command_line

__all__ = ["INTERRUPTED", "execute", "main", "parse", "parser"]

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of the signal."""

_DESCRIPTION = """\
Check on this machine that a parallel model trains like the single-device one, before it runs on accelerators.

Exit status of every command: 0 if everything was checked and passed, 1 if a check failed or could not run, 2 for
invalid input, 130 after Ctrl-C. Status 3, of verify, verify program and verify diff, means that all values match but
the result is inconclusive."""

_EXAMPLES = (
    "hyper-parallel verify model my_model.py:case --plan my_model.py:plan --mesh 3",
    "hyper-parallel verify program train.py --world-size 4",
)

_VERIFY = """\
Compare a parallel run with a single-device run: values, gradients and updated weights.

Without WHAT, run the checks of [tool.hyper_parallel.verify] in pyproject.toml: scripts, models and pairs of runs with
their numbers of ranks, options and time limits.

Exit status without WHAT: 0 if all checks passed, 1 if one failed, 2 if one or its settings are invalid, 3 if one is
inconclusive, 130 after Ctrl-C."""

_VERIFY_EXAMPLES = (
    "hyper-parallel verify model --mesh 3 --html report.html",
    "hyper-parallel verify program train.py --world-size 4",
    "hyper-parallel verify --reports reports",
)

_ELSEWHERE = {
    "help": "run hyper-parallel --help",
    "version": "run hyper-parallel --version",
    **{
        word: f"run hyper-parallel verify {kind}"
        for kind in ("model", "program", "ops", "redistribute", "bugs")
        for word in (kind, f"verify{kind}")
    },
    **{
        name.replace("-", ""): f"it is a command for maintainers; run `python ci/workshop {name}` in a checkout"
        for name in ("bench", "contract", "cost", "coverage", "mutants", "self-test", "trend")
    },
}
"""Advice for names that are not commands here, by the name without hyphens."""

_CHECKS = ("verify", "prove", "fuzz")
"""Commands that warn if an installed framework is newer than all tested versions; ``doctor`` reports it too."""

_BAD_INPUT = 2
_NOT_CHECKED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        argv: command-line arguments, by default those of the process.

    Returns:
        0 if everything was checked and passed; 1 if a check failed or could not run, for example for lack of
        memory; 2 for invalid input; 130 after Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else argv
    return execute(parser(words), words)


def execute(top: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Run a command of the program whose parser is ``top``; return its exit status, as :func:`main` does."""
    words, program = list(argv), top.prog
    try:
        arguments = parse(words, top)
    except UsageError as error:
        _print_error(error.command, str(error), "error", as_json="--json" in words)
        return _BAD_INPUT
    try:
        seed, device = getattr(arguments, "seed", None), getattr(arguments, "device", "cpu")
        check_distinct_outputs(arguments)
        stdout = logs_to_stderr() if arguments.json else contextlib.nullcontext()
        with command_line((*shlex.split(program), *words), seed, device) as header, stdout:
            status: int = arguments.run(arguments)
        sys.stdout.flush()
        if words[0] in _CHECKS and not arguments.json and header.untested:
            print(f"{program}: warning: {header.untested}", file=sys.stderr)
    except KeyboardInterrupt as stopped:
        _report_error(program, arguments, str(stopped) or "interrupted before anything was finished", "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has exited; flushing the rest of the buffer at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, HyperParallelError, ImportError, MemoryError, OSError) as error:
        message = f"{type(error).__name__}: {error}" if isinstance(error, MemoryError) else str(error)
        short = advice(message)
        _report_error(program, arguments, message if short in message else f"{message}\n{short}", "error")
        of_the_machine = isinstance(error, OSError) and not isinstance(error, HyperParallelError)
        return _NOT_CHECKED if short or of_the_machine else _BAD_INPUT
    return status


def parse(argv: Sequence[str], top: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parse a command line; arguments after ``--`` belong to the user's script and are not parsed.

    Args:
        argv: the arguments.
        top: parser of the program, by default that of ``hyper-parallel``.

    Raises:
        UsageError: (a ValueError) the command line is invalid.
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    script = tuple(words[end + 1 :])
    top = parser(words) if top is None else top
    arguments = top.parse_args(words[:end])
    if getattr(arguments, "kind", None) is not None and words[1:2] != [arguments.kind]:
        top.error(
            f"{words[1]} is given before the word {arguments.kind!r}; give options of verify {arguments.kind} after it"
        )
    if script and not hasattr(arguments, "arguments"):
        top.error(f"this command takes no arguments after --, got {shlex.join(script)}")
    arguments.arguments = script
    return arguments


class _ShowVersion(argparse.Action):
    """Prints the version, which is determined only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"hyper-parallel {__version__}")
        parser.exit()


def parser(words: Sequence[str] = ()) -> Parser:
    """Return the parser of all subcommands, or only of the subcommand at the start of ``words``."""
    top = Parser(
        prog="hyper-parallel",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/README.md",
        elsewhere=_ELSEWHERE,
    )
    top.add_argument("--version", action=_ShowVersion, nargs=0, help="show program's version number and exit")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="compare a parallel run with a single-device run",
        description=_VERIFY,
        examples=_VERIFY_EXAMPLES,
        guide="docs/first-plan.md",
    )
    verify_suite.add_options(verify, parse)
    kinds = verify.add_subparsers(metavar="WHAT", dest="kind")
    first, second = (*words[:2], "", "")[:2]
    if first == "verify" and second in _KINDS:
        _KINDS[second](kinds)
    elif first in _COMMANDS:
        _COMMANDS[first](commands)
    else:
        for add_parser in _KINDS.values():
            add_parser(kinds)
        for add_parser in _COMMANDS.values():
            add_parser(commands)
    return top


_KINDS: dict[str, Callable[[Any], None]] = {
    "model": verify_model.add_parser,
    "program": verify_program.add_parser,
    "diff": verify_diff.add_parser,
    "ops": verify_ops.add_parser,
    "redistribute": verify_redistribute.add_parser,
    "bugs": verify_bugs.add_parser,
}
_COMMANDS: dict[str, Callable[[Any], None]] = {
    "compare": compare.add_parser,
    "completion": lambda commands: completion.add_parser(commands, parser),
    "doctor": doctor.add_parser,
    "explain": explain.add_parser,
    "fuzz": fuzz.add_parser,
    "prove": prove.add_parser,
    "record": record.add_parser,
    "reduce": reduce.add_parser,
    "reports": reports.add_parser,
    "trace": trace.add_parser,
}


def _report_error(program: str, arguments: argparse.Namespace, text: str, what: str) -> None:
    """Print an error on stderr, and as JSON on stdout with ``--json``."""
    _print_error(program, text, what, as_json=getattr(arguments, "json", False))


def _print_error(command: str, text: str, what: str, *, as_json: bool) -> None:
    print(coloured(f"{command}: {what}: {text}", sys.stderr), file=sys.stderr)
    if as_json:
        print(json.dumps({"ok": False, what: text}))

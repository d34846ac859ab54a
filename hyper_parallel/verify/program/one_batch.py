"""Finds the arguments with which a script that accumulates micro-batches processes its batch at once.

An option whose name contains ``accum``, such as ``--gradient_accumulation_steps 4``, is the number of micro-batches.
If this option is 1, a script that splits its batch processes the complete batch. A script whose batch size is that of a
micro-batch also needs a batch size multiplied by the former number of micro-batches. The samples of the first step
reveal which of the two is right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.accumulation import require_one_batch
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.reference import Reference
from hyper_parallel.verify.program.worlds import World, run_world

__all__ = ["candidate_arguments", "find_one_batch"]

_OPTION = re.compile(r"(?P<name>-{0,2}[A-Za-z][\w.-]*)(?P<sign>=)?(?P<value>\d+)?")
_ACCUMULATES, _BATCH = re.compile("accum", re.IGNORECASE), re.compile("batch", re.IGNORECASE)


def find_one_batch(
    program: Program, world: World, reference: Reference, progress: Callable[[str], None]
) -> Program | None:
    """Return the program with arguments that make it process a step's batch at once; None if none are found.

    Args:
        program: a script, with its own arguments.
        world: world of the ranks; each attempt runs one step on one rank.
        reference: the run of ``program`` on one rank.
        progress: called with the name of each run before it starts.
    """
    for arguments in candidate_arguments(program):
        other = replace(program, arguments=tuple(arguments))
        progress(f"one step with {' '.join(arguments)}")
        alone = world.alone("nothing")
        with KeepSink(reference.scratch, "one step of one batch") as sink:
            limits = replace(alone.limits, sink=sink, steps=1)
            try:
                run = run_world(other, replace(alone, limits=limits))
                require_one_batch(program, " ".join(arguments), reference.run, run)
            except (InputError, RankFailedError):  # these arguments do not give one batch
                continue
        return other
    return None


def candidate_arguments(program: Program) -> Iterator[list[str]]:
    """Yield arguments that may make a script process its batch at once, those with fewer changes first.

    Args:
        program: the script; options are read from its arguments, and from its calls of ``add_argument`` with a default.
    """
    arguments = list(program.arguments)
    for name, value in _defaults(program):
        if not any(word.partition("=")[0] == name for word in arguments):
            arguments += [name, value]
    options = list(_numbers(arguments))
    for place, name, count in options:
        if not _ACCUMULATES.search(name) or count < 2:
            continue
        whole = _with_number(arguments, place, 1)
        yield whole
        for other, batch, size in options:
            if _BATCH.search(batch) and not _ACCUMULATES.search(batch):
                yield _with_number(whole, other, size * count)


def _numbers(arguments: Sequence[str]) -> Iterator[tuple[int, str, int]]:
    """Yield, for each option with an integer value, the position of the word with the value, the name and the value."""
    for place, word in enumerate(arguments):
        match = _OPTION.fullmatch(word)
        if match is None:
            continue
        if match["sign"] and match["value"]:
            yield place, match["name"], int(match["value"])
        elif word.startswith("-") and not match["sign"] and arguments[place + 1 : place + 2]:
            value = arguments[place + 1]
            if value.isdecimal():
                yield place + 1, word, int(value)


def _with_number(arguments: Sequence[str], place: int, value: int) -> list[str]:
    name, sign, _ = arguments[place].rpartition("=")
    return [*arguments[:place], f"{name}{sign}{value}", *arguments[place + 1 :]]


def _defaults(program: Program) -> Iterator[tuple[str, str]]:
    """Yield name and default of options for accumulation and batch sizes, from a script's calls of ``add_argument``."""
    for node in ast.walk(ast.parse(Path(program.path).read_bytes())):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        names = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        name = next((each for each in names if each.startswith("--")), "")
        default = next((each.value for each in node.keywords if each.arg == "default"), None)
        named = _ACCUMULATES.search(name) or _BATCH.search(name)
        if named and isinstance(default, ast.Constant) and type(default.value) is int:
            yield name, str(default.value)

"""Command-line arguments: numbers within bounds, help pages of fixed width, errors of one line."""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hyper_parallel._text import near_hint, printable
from hyper_parallel.core.dtensor.mesh import DEVICE_TYPES
from hyper_parallel.core.dtensor.random import SEEDS

__all__ = [
    "MOST_GIB",
    "MOST_STEPS",
    "Parser",
    "UsageError",
    "add_declare",
    "add_device",
    "add_reports",
    "add_run_limits",
    "add_seed",
    "declared_placements",
    "float_range",
    "int_range",
    "seed",
]

MOST_STEPS = 1_000_000
"""Maximum number of training steps of a run; a larger number is likely a typo."""

MOST_GIB = 65536.0
"""Maximum number of GiB that a run may write."""

_MOST_SECONDS = 7 * 24 * 3600.0
_MOST_DIGITS = 18


class UsageError(ValueError):
    """A command line that names no command, or has a wrong option.

    Attributes:
        command: the command with wrong arguments, such as ``hyper-parallel verify ops``.
    """

    def __init__(self, command: str, text: str) -> None:
        super().__init__(text)
        self.command = command


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`UsageError`, while argparse prints usage and exits.

    Args:
        options: options of ``argparse.ArgumentParser``; ``formatter_class`` is set here.
        examples: command lines at the end of the help page.
        guide: path of the documentation page in the checkout.
        elsewhere: subcommands that users may expect here, with the command to run instead.

    Attributes:
        leftover: advice that an error about superfluous words or unknown options ends with.
    """

    def __init__(
        self,
        *,
        examples: Sequence[str] = (),
        guide: str = "",
        elsewhere: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        shown = ["\n".join(["examples:", *(f"  {line}" for line in examples)])] if examples else []
        shown += [f"guide: {guide}"] if guide else []
        super().__init__(formatter_class=_HelpPage, epilog="\n\n".join(shown) or None, **options)
        self._elsewhere = dict(elsewhere or {})
        self._words: list[str] = []
        self.leftover = ""

    def error(self, message: str) -> NoReturn:
        """Raise the error, with a pointer to the documentation.

        Raises:
            UsageError: always.
        """
        if message.startswith(_INCOMPLETE) and (option := self._misspelt()):
            message = self._unknown(option)
        pointer = "" if message.endswith(" --help") else f" (see {self.prog} --help)"
        raise UsageError(self.prog, printable(message) + pointer)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and reject superfluous arguments, because only a subcommand's own parser knows its options.

        Raises:
            UsageError: there is an unknown option or a superfluous word.
        """
        self._words = [] if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if options and not (self.leftover and options[0] != unknown[0]):
            self.error(self._unknown(options[0]))
        if unknown:
            self.error(f"unexpected argument{'s' * (len(unknown) > 1)} {' '.join(unknown)}{self.leftover}")
        return parsed, unknown

    def _unknown(self, option: str) -> str:
        """Return the message for an unknown option, with the option that was probably intended."""
        known = list(self._option_string_actions)
        meant = _HABITS.get(option, "")
        hint = (
            f"; did you mean {meant}?"
            if meant.partition(" ")[0] in known
            else near_hint(option, known) or self.leftover
        )
        return f"unknown option {option}{hint}"

    def _misspelt(self) -> str:
        """Return the first unknown option of the command line; ``""`` if all are known."""
        known = tuple(self._option_string_actions)
        for word in self._words:
            name = word.partition("=")[0]
            if not name.startswith("-"):
                if self._subparsers is not None:
                    return ""  # the remaining options belong to the subcommand
            elif name.removeprefix("--").replace("-", "").isalpha() and not any(
                each.startswith(name) for each in known
            ):
                return name
        return ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if isinstance(action.choices, dict):  # the choices are subcommands
            if instead := self._elsewhere.get(value.replace("-", "").replace("_", "")):
                self.error(f"{_NO_COMMAND} {value!r}; {instead}")
            self.error(f"{_NO_COMMAND} {value!r}{near_hint(value, known) or '; commands: ' + ', '.join(known)}")
        hint = near_hint(str(value), known)
        raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(known)}{hint}")


_NO_COMMAND = "there is no command"
_INCOMPLETE = ("the following arguments are required", _NO_COMMAND)
"""Prefixes of argparse's messages that a misspelt option may cause: its value is then taken for another argument."""

_HABITS = {
    **dict.fromkeys(("-n", "-np", "--np", "--nproc", "--nproc-per-node", "--nproc_per_node"), "--world-size"),
    **dict.fromkeys(("--ranks", "--num-ranks", "--world", "--world_size"), "--world-size"),
    **{f"--{axis}": f"--mesh {axis}=N" for axis in ("tp", "dp", "pp", "cp", "ep")},
    **dict.fromkeys(("--backend", "--framework"), "--platform"),
    **dict.fromkeys(("-o", "--out", "--output"), "--report"),
    **dict.fromkeys(("--fault", "--break"), "--inject"),
    **dict.fromkeys(("--gpu", "--cuda", "--npu"), "--device"),
}
"""Options of other launchers and tools, with the equivalent option here."""

_WIDEST = 100


class _HelpPage(argparse.HelpFormatter):
    """Help formatter of fixed width; paragraphs are filled, indented lines are not changed."""

    def __init__(self, prog: str, *_: Any, **__: Any) -> None:
        width = min(shutil.get_terminal_size().columns - 2, _WIDEST)
        super().__init__(prog, max_help_position=28, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if "\n " in part else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent)
            for part in text.split("\n\n")
        )


def int_range(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of an option that is an integer of at least ``least``, and at most ``most`` if given."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        digits = text.strip().removeprefix("-")
        if digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS:
            value = int(text)
            if least <= value and (most is None or value <= most):
                return value
        msg = f"{text!r} must be an integer {bounds}"
        raise argparse.ArgumentTypeError(msg)

    return number


def float_range(most: float, *, least: float | None = None) -> Callable[[str], float]:
    """Return the type of an option that is a number of at most ``most``: above 0, or at least ``least`` if given."""
    bounds = f"above 0 and at most {most:g}" if least is None else f"from {least:g} to {most:g}"

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if (value > 0 if least is None else value >= least) and value <= most:
            return value
        msg = f"{text!r} must be a number {bounds}"
        raise argparse.ArgumentTypeError(msg)

    return number


def seed(text: str) -> int:
    """Return the value of ``--seed`` in the range that every framework accepts.

    Raises:
        argparse.ArgumentTypeError: the value is not a valid seed.
    """
    return int_range(0, SEEDS - 1)(text)


def add_seed(subparser: Any, what: str) -> None:
    """Declare ``--seed`` of a command, 0 by default; ``what`` names the random numbers."""
    subparser.add_argument("--seed", type=seed, default=0, metavar="N", help=f"seed of {what} (default: 0)")


def add_reports(subparser: Any, page: str = "") -> None:
    """Declare ``--json``, ``--report`` and, if ``page`` describes a page of the command, ``--html``."""
    subparser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    subparser.add_argument(
        "--report", metavar="PATH", help="also write the report to PATH, as JSON if it ends in .json"
    )
    if page:
        subparser.add_argument("--html", metavar="FILE", help=f"also write a page with {page}")


def add_run_limits(subparser: Any) -> None:
    """Declare the limits of a program's run: ``--timeout``, and ``--scratch`` and ``--budget`` for its arrays."""
    subparser.add_argument(
        "--timeout",
        type=float_range(_MOST_SECONDS),
        default=300.0,
        metavar="S",
        help="time limit of each run in seconds (default: 300)",
    )
    subparser.add_argument(
        "--scratch",
        metavar="FOLDER",
        help="folder for recorded arrays during the run (default: the system's temporary folder)",
    )
    subparser.add_argument(
        "--budget",
        type=float_range(MOST_GIB),
        metavar="GIB",
        help="maximum size of the files in --scratch (default: the free space)",
    )


def add_device(subparser: Any, help_text: str) -> None:
    """Declare ``--device`` of a command, cpu by default; ``help_text`` names the objects on the device."""
    subparser.add_argument("--device", default="cpu", choices=DEVICE_TYPES, help=f"{help_text} (default: cpu)")


def add_declare(subparser: Any) -> None:
    """Declare ``--declare`` of a command, which :func:`declared_placements` reads."""
    subparser.add_argument(
        "--declare", action="append", metavar="NAME=PLACEMENT",
        help="placement of a value, where it cannot be inferred: 'layers.*.wq.weight=shard(0) over tp'; repeatable",
    )  # fmt: skip


def declared_placements(lines: Sequence[str]) -> dict[str, str]:
    """Return the placements of ``--declare`` by pattern of names.

    Raises:
        ValueError: a line is not ``NAME=PLACEMENT``, or a name is declared twice.
    """
    declared: dict[str, str] = {}
    for line in lines:
        name, sign, placement = line.partition("=")
        if not (name and sign and placement):
            msg = f"--declare {line!r} must look like NAME=PLACEMENT, such as 'layers.*.wq.weight=shard(0) over tp'"
            raise ValueError(msg)
        if name in declared:
            msg = f"--declare {line!r}: {name} is already declared as {declared[name]!r}"
            raise ValueError(msg)
        declared[name] = placement
    return declared

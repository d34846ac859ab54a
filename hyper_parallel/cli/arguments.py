"""Arguments of the command line: numbers within bounds, and one line for what is wrong."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

from hyper_parallel._text import printable
from hyper_parallel.core.dtensor.mesh import DEVICE_TYPES
from hyper_parallel.core.dtensor.random import SEEDS

__all__ = ["MOST_STEPS", "Parser", "UsageError", "add_device", "float_range", "int_range", "seed"]

MOST_STEPS = 1_000_000
"""Training steps of a run; more is a slip of the keyboard, of which one would hear after days."""

_MOST_DIGITS = 18


class UsageError(ValueError):
    """A command line that names no command, or has a wrong option.

    Attributes:
        command: whose arguments are wrong, such as ``hyper-parallel verify ops``.
    """

    def __init__(self, command: str, text: str) -> None:
        super().__init__(text)
        self.command = command


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`UsageError` where argparse prints pages and ends the process."""

    def error(self, message: str) -> NoReturn:
        """Raise the error, with where to read what is right.

        Raises:
            UsageError: always.
        """
        raise UsageError(self.prog, f"{printable(message)} (see {self.prog} --help)")


def int_range(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of an option that is a whole number of at least ``least``, and at most ``most`` if given."""
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
        msg = f"{text!r} is no number {bounds}"
        raise argparse.ArgumentTypeError(msg)

    return number


def seed(text: str) -> int:
    """Return the value of ``--seed``, which every framework takes.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    return int_range(0, SEEDS - 1)(text)


def add_device(subparser: Any, help_text: str) -> None:
    """Declare ``--device`` of a command, cpu by default; ``help_text`` says what is on the device."""
    subparser.add_argument("--device", default="cpu", choices=DEVICE_TYPES, help=f"{help_text} (default: cpu)")

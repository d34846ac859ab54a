"""How long the ranks of a world may take where nobody says so."""

from __future__ import annotations

import math
import os

__all__ = ["TIMEOUT_VARIABLE", "positive_seconds", "rank_seconds"]

TIMEOUT_VARIABLE = "HP_RANK_TIMEOUT"
"""Seconds for worlds that are given no limit of their own: raise it where machines are slow, or shared."""

_SECONDS = 60.0


def rank_seconds() -> float:
    """Seconds after which a world that was given no limit is ended: 60, or what HP_RANK_TIMEOUT says.

    Raises:
        ValueError: the variable holds no positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    return positive_seconds(text, f"{TIMEOUT_VARIABLE}={text}") if text else _SECONDS


def positive_seconds(given: object, said: str) -> float:
    """A time limit: with any other, ranks would be ended before they start, or never.

    Args:
        given: a number, or its text.
        said: how the error names where it was given, and what.

    Raises:
        ValueError: it is no positive number.
    """
    try:
        value = float(given)  # type: ignore[arg-type]  # what is no number is told below
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        msg = f"{said}: expected a positive number of seconds"
        raise ValueError(msg)
    return value

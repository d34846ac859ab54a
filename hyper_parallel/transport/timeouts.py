"""The default time limit of a world (HP_RANK_TIMEOUT)."""

from __future__ import annotations

import math
import os
import threading

__all__ = ["TIMEOUT_VARIABLE", "positive_seconds", "rank_seconds"]

TIMEOUT_VARIABLE = "HP_RANK_TIMEOUT"
"""Seconds for worlds without a time limit of their own: raise it on slow or shared machines."""

_SECONDS = 60.0


def rank_seconds() -> float:
    """Seconds after which a world without a time limit of its own is ended: HP_RANK_TIMEOUT, by default 60.

    Raises:
        ValueError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    return positive_seconds(text, f"{TIMEOUT_VARIABLE}={text}") if text else _SECONDS


def positive_seconds(seconds: object, description: str) -> float:
    """Return a time limit as a number, after checking that it is positive and not too long to wait for.

    Args:
        seconds: a number, or its text.
        description: name and value of the limit's setting, for the error.

    Raises:
        ValueError: ``seconds`` is not a positive number, or is longer than a machine can wait.
    """
    try:
        value = float(seconds)  # type: ignore[arg-type]  # anything else is rejected below
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value <= threading.TIMEOUT_MAX:
        msg = f"{description}: expected a positive number of seconds"
        raise ValueError(msg)
    return value

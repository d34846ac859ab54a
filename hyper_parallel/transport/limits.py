"""How long the ranks of a world may take where nobody says so."""

from __future__ import annotations

import math
import os

__all__ = ["TIMEOUT_VARIABLE", "rank_seconds"]

TIMEOUT_VARIABLE = "HP_RANK_TIMEOUT"
"""Seconds for worlds that are given no limit of their own: raise it where machines are slow, or shared."""

_SECONDS = 60.0


def rank_seconds() -> float:
    """Seconds after which a world that was given no limit is ended: 60, or what HP_RANK_TIMEOUT says.

    Raises:
        ValueError: the variable holds no positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return _SECONDS
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        msg = f"{TIMEOUT_VARIABLE}={text}: expected a positive number of seconds"
        raise ValueError(msg)
    return value

"""Philox 4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011) on arrays of counters.

Two of the four 32-bit words share one uint64, and pieces of the counters that fit a core's cache go through all rounds
before the next piece begins: what a round costs is memory traffic, and there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["pieces"]

_ROUNDS = 10
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD, _LOW = np.uint64(32), 0xFFFFFFFF
_PIECE = 8192


def pieces(seed: int, call: int, counters: Any) -> Iterator[Any]:
    """Two uint64 per counter, ``word 0 << 32 | word 1`` and ``word 2 << 32 | word 3``, some counters at a time.

    Args:
        seed: key, 64 bits.
        call: the counter's upper half.
        counters: the counter's lower half: a range, or a one-dimensional uint64 array.

    Yields:
        Arrays of shape ``(some, 2)``, which the next one overwrites.
    """
    keys = _round_keys(seed)
    upper = np.uint64(_swapped(call))
    spare = np.empty((4, min(_PIECE, len(counters))), np.uint64)
    pairs = np.empty((spare.shape[1], 2), np.uint64)
    for start in range(0, len(counters), _PIECE):
        lower = counters[start : start + _PIECE]
        if isinstance(lower, range):
            lower = np.arange(lower.start, lower.stop, dtype=np.uint64)
        first, second, left, right = spare[:, : len(lower)]
        np.left_shift(lower, _WORD, out=first)
        np.right_shift(lower, _WORD, out=left)
        np.bitwise_or(first, left, out=first)
        second.fill(upper)
        for key, other in keys:
            np.right_shift(first, _WORD, out=left)
            np.multiply(left, _MULTIPLY[0], out=left)
            np.right_shift(second, _WORD, out=right)
            np.multiply(right, _MULTIPLY[1], out=right)
            _mixed(first, key, right)
            _mixed(second, other, left)
        found = pairs[: len(lower)]
        found[:, 0], found[:, 1] = first, second
        yield found


def _mixed(half: Any, key: Any, product: Any) -> None:
    """``product`` with its upper word mixed with the half's lower word and the round's key; in place."""
    np.left_shift(half, _WORD, out=half)
    np.bitwise_xor(half, key, out=half)
    np.bitwise_xor(half, product, out=half)


def _round_keys(seed: int) -> list[tuple[Any, Any]]:
    keys, key = [], (seed & _LOW, seed >> 32 & _LOW)
    for _ in range(_ROUNDS):
        keys.append((np.uint64(key[0] << 32), np.uint64(key[1] << 32)))
        key = ((key[0] + _WEYL[0]) & _LOW, (key[1] + _WEYL[1]) & _LOW)
    return keys


def _swapped(value: int) -> int:
    """The lower word first."""
    return (value & _LOW) << 32 | (value >> 32 & _LOW)

"""Philox 4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011) on arrays of counters.

Two of the four 32-bit words share one uint64, and a piece of the counters that fits a core's cache goes through all
rounds before the next one begins: what a round costs is memory traffic, and there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["PIECE", "Philox"]

_ROUNDS = 10
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD, _LOW = np.uint64(32), 0xFFFFFFFF

PIECE = 8192
"""Counters at a time."""


class Philox:
    """Random words by counter; what it computes with, and the answer, are used again by the next call.

    Args:
        seed: key, 64 bits.
        call: the counter's upper half.
        most: the largest number of counters of one call; more than :data:`PIECE` no longer fit a core's cache.
    """

    def __init__(self, seed: int, call: int, most: int = PIECE) -> None:
        self._keys = _round_keys(seed)
        self._upper = np.uint64(_swapped(call))
        self._spare = np.empty((4, most), np.uint64)
        self._pairs = np.empty((most, 2), np.uint64)

    def words(self, counters: Any) -> Any:
        """Two uint64 per counter, ``word 0 << 32 | word 1`` and ``word 2 << 32 | word 3``.

        Args:
            counters: the counter's lower half, a one-dimensional uint64 array.

        Returns:
            An array of shape ``(len(counters), 2)``, which the next call overwrites.
        """
        first, second, left, right = self._spare[:, : len(counters)]
        np.left_shift(counters, _WORD, out=first)
        np.right_shift(counters, _WORD, out=left)
        np.bitwise_or(first, left, out=first)
        second.fill(self._upper)
        for key, other in self._keys:
            np.right_shift(first, _WORD, out=left)
            np.multiply(left, _MULTIPLY[0], out=left)
            np.right_shift(second, _WORD, out=right)
            np.multiply(right, _MULTIPLY[1], out=right)
            _mixed(first, key, right)
            _mixed(second, other, left)
        found = self._pairs[: len(counters)]
        found[:, 0], found[:, 1] = first, second
        return found


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

"""Philox 4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), NumPy's: words by their place.

A block of four words of 64 bits has a counter of its own, so any stretch of blocks can be computed without what comes
before it. NumPy goes on from where it is; going elsewhere costs as much as some hundred blocks.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

__all__ = ["BLOCK", "PIECE", "Philox"]

BLOCK = 4
"""Words of 64 bits in a block."""
PIECE = 4096
"""Blocks at a time: they stay in a core's cache."""
_NEAR = 128
"""Blocks that are drawn and dropped rather than gone around."""
_COUNTERS = 1 << 256
_CALL, _KEYS = 128, (1 << 64) - 1


class Philox:
    """The words of one call.

    Args:
        seed: key, of which 64 bits count.
        call: the counter's upper half.
    """

    def __init__(self, seed: int, call: int) -> None:
        # NumPy counts before it computes: the first block comes of the counter after this one.
        self._source: Any = np.random.Philox(key=seed & _KEYS, counter=((call << _CALL) - 1) % _COUNTERS)
        self._next = 0

    def words(self, block: int, count: int) -> Any:
        """The words of ``count`` blocks from number ``block`` on, an array of uint64."""
        if block != self._next:
            self._source.advance((block - self._next) % _COUNTERS)
        self._next = block + count
        return self._source.random_raw(BLOCK * count)

    def runs(self, first: Any, width: int) -> Any:
        """The words of several stretches of blocks.

        Args:
            first: the number of each one's first block, ascending; an array of integers.
            width: blocks in each.

        Returns:
            A row of words per stretch.
        """
        found = np.empty((len(first), width, BLOCK), np.uint64)
        steps = np.diff(first)
        far = np.flatnonzero(steps > width + _NEAR) + 1
        # So many that what is drawn at once, with what lies between, stays small.
        many = max(1, PIECE // int(np.max(steps, initial=1, where=steps <= width + _NEAR)))
        for low, high in itertools.pairwise((0, *far.tolist(), len(first))):
            for start in range(low, high, many):
                stop = min(start + many, high)
                self._draw(first[start:stop], width, found[start:stop])
        return found.reshape(len(first), BLOCK * width)

    def _draw(self, first: Any, width: int, found: Any) -> None:
        begin = int(first[0])
        if len(first) == 1:
            found[0] = self.words(begin, width).reshape(width, BLOCK)
            return
        drawn = self.words(begin, int(first[-1]) + width - begin).reshape(-1, BLOCK)
        places = (first - first[0]).astype(np.intp)[:, None] + np.arange(width)
        np.take(drawn, places, 0, out=found, mode="clip")  # within bounds; the default copies what it writes to

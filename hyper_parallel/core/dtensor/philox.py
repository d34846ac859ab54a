"""Philox 4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), as NumPy computes it.

It is a counter-based generator: every block of four 64-bit words has its own counter, so a run of blocks is computed
without those before it. NumPy's generator continues from where it is; skipping any number of blocks costs as much as
computing about a hundred.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

__all__ = ["BLOCKS_AT_ONCE", "WORDS_PER_BLOCK", "Philox"]

WORDS_PER_BLOCK = 4
"""Words of 64 bits in a block."""
BLOCKS_AT_ONCE = 4096
"""Blocks computed at a time, so that they stay in a core's cache."""
_SHORT_GAP = 128
"""Blocks between two runs that are computed and dropped, since skipping them would cost more."""
_COUNTERS = 1 << 256
_CALL_SHIFT, _KEY_MASK = 128, (1 << 64) - 1


class Philox:
    """The random words of one call.

    Args:
        seed: the key; only its low 64 bits are used.
        call: call index, the upper half of the counter.
    """

    def __init__(self, seed: int, call: int) -> None:
        # NumPy increments the counter before it computes a block.
        self._source: Any = np.random.Philox(key=seed & _KEY_MASK, counter=((call << _CALL_SHIFT) - 1) % _COUNTERS)
        self._next = 0

    def words(self, block: int, count: int) -> Any:
        """Return the words of ``count`` blocks from block ``block`` on: uint64, of shape ``(4 * count,)``."""
        if block != self._next:
            self._source.advance((block - self._next) % _COUNTERS)
        self._next = block + count
        return self._source.random_raw(WORDS_PER_BLOCK * count)

    def runs(self, first: Any, width: int) -> Any:
        """Return the words of several runs of blocks.

        Args:
            first: integer array, the first block of each run, ascending.
            width: blocks per run.

        Returns:
            uint64 of shape ``(len(first), 4 * width)``.
        """
        words = np.empty((len(first), width, WORDS_PER_BLOCK), np.uint64)
        steps = np.diff(first)
        far = np.flatnonzero(steps > width + _SHORT_GAP) + 1
        # Take as many runs at once as fit in BLOCKS_AT_ONCE blocks, gaps included.
        runs_at_once = max(1, BLOCKS_AT_ONCE // int(np.max(steps, initial=1, where=steps <= width + _SHORT_GAP)))
        for low, high in itertools.pairwise((0, *far.tolist(), len(first))):
            for start in range(low, high, runs_at_once):
                stop = min(start + runs_at_once, high)
                self._fill(first[start:stop], width, words[start:stop])
        return words.reshape(len(first), WORDS_PER_BLOCK * width)

    def _fill(self, first: Any, width: int, words: Any) -> None:
        """Write the words of neighbouring runs to ``words``; the blocks between them are computed and dropped."""
        begin = int(first[0])
        if len(first) == 1:
            words[0] = self.words(begin, width).reshape(width, WORDS_PER_BLOCK)
            return
        blocks = self.words(begin, int(first[-1]) + width - begin).reshape(-1, WORDS_PER_BLOCK)
        indices = (first - first[0]).astype(np.intp)[:, None] + np.arange(width)
        np.take(blocks, indices, 0, out=words, mode="clip")  # within bounds; the default copies what it writes to

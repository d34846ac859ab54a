"""Random numbers of a local shard, computed block by block to save memory.

The random words of an element depend only on its index in the global tensor (see ``random``), not on the blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box

__all__ = [
    "BLOCKS_AT_ONCE",
    "WORDS_PER_BLOCK",
    "Distribution",
    "IndexRuns",
    "LocalRandomNumbers",
    "Philox",
    "bernoulli",
    "integers",
    "normal",
    "uniform",
]


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


_WORDS = 2 * WORDS_PER_BLOCK
"""32-bit words in a block."""
_WORD_DTYPES = {1: "<u4", 2: "<u8"}
_FLOAT32_BITS = 24
"""Bits of a float32 significand; a value of no more bits is computed from one 32-bit word."""


@dataclass(frozen=True)
class Distribution:
    """How random words become random numbers.

    Attributes:
        words_per_element: 32-bit words per element, 1 or 2.
        transform: function from an array of words, one row per run of blocks, to numbers of the
            same shape.
    """

    words_per_element: int
    transform: Callable[[Any], Any]

    def map(self, fn: Callable[[Any], Any]) -> Distribution:
        """Return the distribution of ``fn`` of the numbers; ``fn`` acts elementwise on a NumPy array."""
        return Distribution(self.words_per_element, lambda words: fn(self.transform(words)))


@dataclass(frozen=True)
class IndexRuns:
    """The elements of a box as runs of consecutive global indices, all of one length and as long as possible.

    Attributes:
        length: elements in a run.
        offset: contribution of the dims inside a run to the global index of its first element.
        outer: per other dim, innermost first: start and size of the box, and the stride of the global index.
    """

    length: int
    offset: int
    outer: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, shape: Sequence[int], box: Box) -> IndexRuns:
        """Return the runs of ``box`` in a tensor of ``shape``."""
        length, offset, stride, inside = 1, 0, 1, True
        outer: list[tuple[int, int, int]] = []
        for size, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
            if inside:
                offset += start * stride
                length *= stop - start
                inside = stop - start == size
            else:
                outer.append((start, stop - start, stride))
            stride *= size
        return cls(length, offset, tuple(outer))

    @property
    def count(self) -> int:
        """Number of runs."""
        return math.prod(size for _, size, _ in self.outer)

    def starts(self, low: int, high: int) -> Any:
        """Return the global index of the first element of runs ``low`` to ``high``, as uint64."""
        remaining = np.arange(low, high, dtype=np.uint64)
        indices = np.full(remaining.shape, self.offset, np.uint64)
        for start, size, stride in self.outer:
            indices += (remaining % np.uint64(size) + np.uint64(start)) * np.uint64(stride)
            remaining //= np.uint64(size)
        return indices


@dataclass(frozen=True)
class LocalRandomNumbers:
    """The random numbers of one rank's shard in one random call; they are computed on demand.

    Attributes:
        shape: local shape.
        runs: the shard's elements; the shard is one row per run.
        seed: key of the generator.
        call: call index.
        distribution: element ``i`` of the global tensor uses the words from ``i * words_per_element`` on.
    """

    shape: tuple[int, ...]
    runs: IndexRuns
    seed: int
    call: int
    distribution: Distribution

    @property
    def rows(self) -> tuple[int, int]:
        """Shape of the shard as one row per run."""
        return self.runs.count, self.runs.length

    def array(self) -> Any:
        """Return all numbers as a NumPy array of the local shape."""
        words_per_element = self.distribution.words_per_element
        no_words = np.zeros((0, _WORDS // words_per_element), _WORD_DTYPES[words_per_element])
        numbers = np.empty(self.rows, self.distribution.transform(no_words).dtype)
        for rows, columns, values in self.blocks():
            numbers[rows, columns] = values
        return numbers.reshape(self.shape)

    def blocks(self) -> Iterator[tuple[slice, slice, Any]]:
        """Yield rows and columns of :attr:`rows` with the numbers there; use them before the next are computed."""
        if 0 in self.shape:
            return
        per_block = _WORDS // self.distribution.words_per_element
        # Enough blocks for a run that starts anywhere within its first block.
        widest = -(-(self.runs.length + per_block - 1) // per_block)
        if widest <= BLOCKS_AT_ONCE:
            yield from self._many_runs(per_block, widest)
            return
        philox = Philox(self.seed, self.call)
        for row in range(self.runs.count):
            yield from self._long_run(philox, per_block, row)

    def _many_runs(self, per_block: int, width: int) -> Iterator[tuple[slice, slice, Any]]:
        """Compute as many complete runs at a time as fit."""
        count, length, all_columns = self.runs.count, self.runs.length, slice(None)
        runs_at_once = min(count, BLOCKS_AT_ONCE // width)
        philox = Philox(self.seed, self.call)
        for low in range(0, count, runs_at_once):
            starts = self.runs.starts(low, min(low + runs_at_once, count))
            skipped = (starts % np.uint64(per_block)).astype(np.intp)
            values = self._values(philox.runs(starts // np.uint64(per_block), width))
            if (skipped == skipped[0]).all():
                values = values[:, skipped[0] : skipped[0] + length]
            else:
                values = np.take_along_axis(values, skipped[:, None] + np.arange(length), 1)
            yield slice(low, low + len(starts)), all_columns, values

    def _long_run(self, philox: Philox, per_block: int, row: int) -> Iterator[tuple[slice, slice, Any]]:
        """Compute a run that does not fit at once, part by part."""
        first, skipped = divmod(int(self.runs.starts(row, row + 1)[0]), per_block)
        length = self.runs.length
        for start in range(0, length + skipped, BLOCKS_AT_ONCE * per_block):
            count = min(BLOCKS_AT_ONCE, -(-(length + skipped - start) // per_block))
            block = first + start // per_block
            values = self._values(philox.words(block, count).reshape(1, -1))
            low, high = max(start - skipped, 0), min(start - skipped + count * per_block, length)
            yield slice(row, row + 1), slice(low, high), values[:, low + skipped - start : high + skipped - start]

    def _values(self, words: Any) -> Any:
        dtype = _WORD_DTYPES[self.distribution.words_per_element]
        return self.distribution.transform(words.astype("<u8", copy=False).view(dtype))


def uniform(bits: int = 53) -> Distribution:
    """Return the uniform distribution in ``[0, 1)``, of ``bits`` random bits; see :func:`.random.uniform`."""
    if bits > _FLOAT32_BITS:
        return Distribution(2, lambda words: (words >> np.uint64(64 - bits)) * 2.0**-bits)
    return Distribution(1, lambda words: (words >> np.uint32(32 - bits)).astype(np.float32) * np.float32(2.0**-bits))


def normal(bits: int = 53) -> Distribution:
    """Return the standard normal distribution; each pair of values comes from one radius and one angle.

    This is the method of Box and Muller (1958).
    """
    return Distribution(1 if bits <= _FLOAT32_BITS else 2, _gaussian)


def integers(low: int, high: int) -> Distribution:
    """Return the distribution of int64 values in ``[low, high)``."""
    return Distribution(2, lambda words: low + (words % np.uint64(high - low)).astype(np.int64))


def bernoulli(probability: float) -> Distribution:
    """Return the distribution of booleans that are True with ``probability``."""
    bound = math.ceil(probability * 2.0**32)
    return Distribution(1, lambda words: words < bound if bound < 2**32 else np.ones(words.shape, bool))


def _gaussian(words: Any) -> Any:
    """Return pairs of normal values from pairs of uniform words."""
    normals = np.empty(words.shape, f"f{words.dtype.itemsize}")
    scale = normals.dtype.type(2.0 ** -(8 * words.dtype.itemsize))
    # The offset of half a step keeps the logarithm finite.
    radius = words[:, ::2].astype(normals.dtype) * scale + scale / 2
    np.log(radius, out=radius)
    np.sqrt(np.multiply(radius, -2, out=radius), out=radius)
    angle = words[:, 1::2].astype(normals.dtype) * (scale * normals.dtype.type(2.0 * np.pi))
    np.multiply(radius, np.cos(angle), out=normals[:, ::2])
    np.multiply(radius, np.sin(angle), out=normals[:, 1::2])
    return normals

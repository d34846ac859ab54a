"""Random numbers of a piece, computed block after block: beside the numbers themselves there is only a block's worth.

An element's words depend on its place in the whole tensor alone (``random``), so where blocks begin changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.philox import BLOCK, PIECE, Philox

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box

__all__ = ["Distribution", "IndexRuns", "LocalSample", "bernoulli", "integers", "normal", "uniform"]

_WORDS = 2 * BLOCK
"""Words of 32 bits in a block."""
_KINDS = {1: "<u4", 2: "<u8"}
_SHORT = 24
"""Digits of float32: a value that needs no more is made of one word of 32 bits."""


@dataclass(frozen=True)
class Distribution:
    """How random words become numbers.

    Attributes:
        each: 32-bit words per element, 1 or 2.
        value: from an array with a row of words per block to the numbers, one of the same shape.
    """

    each: int
    value: Callable[[Any], Any]

    def then(self, fn: Callable[[Any], Any]) -> Distribution:
        """``fn``, which works element by element, of the numbers."""
        return Distribution(self.each, lambda words: fn(self.value(words)))


@dataclass(frozen=True)
class IndexRuns:
    """The elements of a box as runs of consecutive global indices, all of one length, as long as they are.

    Attributes:
        length: elements in a run.
        first: what the dims inside of a run add to the index of its first element.
        outer: the other dims, innermost first: where the box begins, how long it is, and what a step adds to the index.
    """

    length: int
    first: int
    outer: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, shape: Sequence[int], box: Box) -> IndexRuns:
        """Those of ``box`` in a tensor of ``shape``."""
        length, first, step, joined = 1, 0, 1, True
        outer: list[tuple[int, int, int]] = []
        for size, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
            if joined:
                first += start * step
                length *= stop - start
                joined = stop - start == size
            else:
                outer.append((start, stop - start, step))
            step *= size
        return cls(length, first, tuple(outer))

    @property
    def count(self) -> int:
        """Number of runs."""
        return math.prod(size for _, size, _ in self.outer)

    def starts(self, low: int, high: int) -> Any:
        """Global index of the first element of runs ``low`` to ``high``, in uint64."""
        rest = np.arange(low, high, dtype=np.uint64)
        found = np.full(rest.shape, self.first, np.uint64)
        for start, size, step in self.outer:
            found += (rest % np.uint64(size) + np.uint64(start)) * np.uint64(step)
            rest //= np.uint64(size)
        return found


@dataclass(frozen=True)
class LocalSample:
    """A rank's numbers of one random call.

    Attributes:
        shape: of the rank's piece.
        runs: its elements; the piece is a row per run.
        seed: key.
        call: call index.
        distribution: element ``i`` of the whole has words ``i * each`` and on of the whole sequence.
    """

    shape: tuple[int, ...]
    runs: IndexRuns
    seed: int
    call: int
    distribution: Distribution

    @property
    def rows(self) -> tuple[int, int]:
        """Shape of the piece as a row per run."""
        return self.runs.count, self.runs.length

    def array(self) -> Any:
        """All of them, in ``shape``."""
        each = self.distribution.each
        kind = self.distribution.value(np.zeros((0, _WORDS // each), _KINDS[each])).dtype
        found = np.empty(self.rows, kind)
        for rows, columns, values in self.blocks():
            found[rows, columns] = values
        return found.reshape(self.shape)

    def blocks(self) -> Iterator[tuple[slice, slice, Any]]:
        """Which rows and columns of :attr:`rows`, and the numbers there, to be used before the next are asked for."""
        if 0 in self.shape:
            return
        per_block = _WORDS // self.distribution.each
        # Enough blocks for a run wherever in its first block it begins.
        widest = -(-(self.runs.length + per_block - 1) // per_block)
        if widest <= PIECE:
            yield from self._some_runs(per_block, widest)
            return
        philox = Philox(self.seed, self.call)
        for row in range(self.runs.count):
            yield from self._one_run(philox, per_block, row)

    def _some_runs(self, per_block: int, width: int) -> Iterator[tuple[slice, slice, Any]]:
        """As many whole runs at a time as fit."""
        count, length, every = self.runs.count, self.runs.length, slice(None)
        many = min(count, PIECE // width)
        philox = Philox(self.seed, self.call)
        for low in range(0, count, many):
            starts = self.runs.starts(low, min(low + many, count))
            skipped = (starts % np.uint64(per_block)).astype(np.intp)
            values = self._values(philox.runs(starts // np.uint64(per_block), width))
            if (skipped == skipped[0]).all():
                values = values[:, skipped[0] : skipped[0] + length]
            else:
                values = np.take_along_axis(values, skipped[:, None] + np.arange(length), 1)
            yield slice(low, low + len(starts)), every, values

    def _one_run(self, philox: Philox, per_block: int, row: int) -> Iterator[tuple[slice, slice, Any]]:
        """A run that is longer than what is computed at a time."""
        first, skipped = divmod(int(self.runs.starts(row, row + 1)[0]), per_block)
        length = self.runs.length
        for start in range(0, length + skipped, PIECE * per_block):
            count = min(PIECE, -(-(length + skipped - start) // per_block))
            block = first + start // per_block
            values = self._values(philox.words(block, count).reshape(1, -1))
            low, high = max(start - skipped, 0), min(start - skipped + count * per_block, length)
            yield slice(row, row + 1), slice(low, high), values[:, low + skipped - start : high + skipped - start]

    def _values(self, words: Any) -> Any:
        return self.distribution.value(words.astype("<u8", copy=False).view(_KINDS[self.distribution.each]))


def uniform(digits: int = 53) -> Distribution:
    """Values in ``[0, 1)``; see :func:`.random.uniform`."""
    if digits > _SHORT:
        return Distribution(2, lambda words: (words >> np.uint64(64 - digits)) * 2.0**-digits)
    return Distribution(
        1, lambda words: (words >> np.uint32(32 - digits)).astype(np.float32) * np.float32(2.0**-digits)
    )


def normal(digits: int = 53) -> Distribution:
    """The standard normal distribution (Box-Muller): two neighbours share a radius and an angle."""
    return Distribution(1 if digits <= _SHORT else 2, _gaussian)


def integers(low: int, high: int) -> Distribution:
    """Int64 in ``[low, high)``."""
    return Distribution(2, lambda words: low + (words % np.uint64(high - low)).astype(np.int64))


def bernoulli(probability: float) -> Distribution:
    """Truths, each with ``probability``."""
    bound = math.ceil(probability * 2.0**32)
    return Distribution(1, lambda words: words < bound if bound < 2**32 else np.ones(words.shape, bool))


def _gaussian(words: Any) -> Any:
    """Pairs of uniform words to pairs of normal values."""
    found = np.empty(words.shape, f"f{words.dtype.itemsize}")
    scale = found.dtype.type(2.0 ** -(8 * words.dtype.itemsize))
    # The offset of half a step keeps the logarithm finite.
    radius = words[:, ::2].astype(found.dtype) * scale + scale / 2
    np.log(radius, out=radius)
    np.sqrt(np.multiply(radius, -2, out=radius), out=radius)
    angle = words[:, 1::2].astype(found.dtype) * (scale * found.dtype.type(2.0 * np.pi))
    np.multiply(radius, np.cos(angle), out=found[:, ::2])
    np.multiply(radius, np.sin(angle), out=found[:, 1::2])
    return found

"""Fingerprints: 17 numbers that represent a tensor in a recording, and the tolerance between two of them.

The numbers are norm, sum, smallest and largest element, number of non-finite elements, eight projections and four
elements.

**Projections.** A tensor of ``n`` elements is a matrix ``X`` of ``rows x columns``, with the remaining elements as one
more row. Projection ``j`` is ``r^T X c_j``, where ``r`` and ``c_j`` are vectors of random signs. The hash :func:`signs`
draws them from a fixed seed, so they are the same on every machine and in every version. The projection vector has
``n`` signs, so its norm is ``sqrt(n)``, and the mean square of the projections of a difference ``d`` is ``|d|^2`` on
average: eight projections measure the distance of two tensors without either of them.

**Effect of rounding.** If the tolerance of element ``i`` is ``b_i``, the tolerances of the numbers are:

- norm: ``|b|_2``, since ``| |x + d| - |x| | <= |d|``; smallest and largest element: ``max b``; an element: its own
  ``b_i``; sum: ``|b|_1``;
- projection: at most ``|b|_1``, and by Cauchy-Schwarz at most ``|b|_2`` times the norm of the projection vector. Both
  are reached only if every error has the sign of the projection vector, but errors are independent of that vector. For
  a fixed ``d``, the moments of a product of two sign vectors (hypercontractivity: ``|Z|_q <= (q - 1) |Z|_2``) imply
  that a projection exceeds :data:`TIMES` times ``|d|_2`` with a probability below 3e-6. The tolerance is therefore
  ``min(|b|_1, TIMES |b|_2)``;
- all numbers: plus their own rounding, as they are computed in the dtype of the tensor, at least float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "CHOSEN",
    "ELEMENTS",
    "LARGEST",
    "LEAST",
    "NORM",
    "NOT_FINITE",
    "NUMBERS",
    "PROJECTED",
    "PROJECTIONS",
    "SUM",
    "TIMES",
    "Fingerprint",
    "fingerprint_of",
    "grid",
    "numbers_of",
    "places",
    "signs",
    "tolerance",
]

PROJECTIONS = 8
ELEMENTS = 4
NUMBERS = ("norm", "sum", "least", "largest", "not finite") + ("projection",) * PROJECTIONS + ("element",) * ELEMENTS
"""Names of the numbers of a fingerprint; the constants below are their positions."""

NORM, SUM, LEAST, LARGEST, NOT_FINITE = range(5)
PROJECTED = slice(NOT_FINITE + 1, NOT_FINITE + 1 + PROJECTIONS)
CHOSEN = slice(PROJECTED.stop, PROJECTED.stop + ELEMENTS)

TIMES = 32.0
"""Maximum ratio of a projection of a difference to the norm of the difference."""

_ROWS = 32
_MOST_COLUMNS = 8192
_CHUNK = 32
"""Maximum number of rows per chunk: one megabyte, which stays in the cache for repeated reads."""

_SMALL = 1024
"""Maximum number of elements of a tensor for which all projections are one product with a matrix, not chunks."""

_OF_NORM, _OF_SUM, _OF_PROJECTION = 64.0, 32.0, 256.0
"""Tolerance for the rounding of norm, sum and projections themselves, in units of rounding of the tensor's norm.

For the sum, it is also multiplied by the square root of the number of elements. Within :data:`_CHUNK` rows, numbers are
added up in the dtype of the tensor, otherwise in float64. The value for projections allows for :data:`TIMES`."""

_OF_STATISTICS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative rounding error of statistics in half precision, which are summed in float32 and rounded to this dtype."""

_SEED = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Fingerprint:
    """A tensor in a recording.

    Attributes:
        numbers: float64 array, in the order of :data:`NUMBERS`.
        shape: shape of the tensor on its rank.
        dtype: dtype of the tensor, such as ``bfloat16``.
        whole: all elements, half precision as float32; None unless the recording was requested to store them.
        known: positions of the known numbers if some are missing, as in the statistics of another tool; None for all.
    """

    numbers: Any
    shape: tuple[int, ...]
    dtype: str
    whole: Any = None
    known: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def norm(self) -> float:
        """Norm of the tensor."""
        return float(self.numbers[NORM])

    @property
    def extreme(self) -> float:
        """Largest magnitude of an element."""
        return float(np.abs(self.numbers[[LEAST, LARGEST]]).max())

    @property
    def not_finite(self) -> int | None:
        """Number of non-finite elements; None if unknown."""
        return int(self.numbers[NOT_FINITE]) if self.known is None or NOT_FINITE in self.known else None

    @property
    def some_not_finite(self) -> bool | None:
        """Whether some elements are not finite; None if unknown. Without a count, it is read from the extremes."""
        if self.not_finite is not None:
            return self.not_finite > 0
        return True if self.known is not None and LARGEST in self.known else None

    @property
    def is_exact(self) -> bool:
        """Whether the elements are integers or booleans."""
        return not self.dtype.startswith(("float", "bfloat", "complex"))

    def same(self, other: Fingerprint) -> bool:
        """Return whether shapes and common numbers are equal, and all elements if both fingerprints store them."""
        places = self.shared(other)
        if self.shape != other.shape or not np.array_equal(self.numbers[places], other.numbers[places], equal_nan=True):
            return False
        return not self.both_whole(other) or np.array_equal(self.whole, other.whole, equal_nan=not self.is_exact)

    def both_whole(self, other: Fingerprint) -> bool:
        """Return whether both fingerprints store all elements, in the same shape."""
        return self.whole is not None and other.whole is not None and self.shape == other.shape

    def shared(self, other: Fingerprint) -> Any:
        """Return the positions of the numbers that both fingerprints have, as an index into ``numbers``."""
        if self.known is None or other.known is None:
            found = other.known if self.known is None else self.known
            return slice(None) if found is None else list(found)
        return [place for place in self.known if place in other.known]

    def both_have(self, place: int, other: Fingerprint) -> bool:
        """Return whether both fingerprints have the number at a position."""
        return all(each.known is None or place in each.known for each in (self, other))

    def comparable(self, other: Fingerprint) -> bool:
        """Return whether the fingerprints can be compared: both have all elements, the norm, the extremes or a hash."""
        return self.both_whole(other) or any(self.both_have(place, other) for place in (NORM, LARGEST, CHOSEN.start))

    def finite_alike(self, other: Fingerprint) -> bool:
        """Return whether the numbers of non-finite elements are equal; if one is unknown, whether both have some."""
        if None not in (self.not_finite, other.not_finite):
            return self.not_finite == other.not_finite
        some = self.some_not_finite, other.some_not_finite
        return None in some or some[0] == some[1]

    def distance(self, other: Fingerprint) -> float:
        """Return an estimate of the norm of the difference of two tensors of the same shape.

        The estimate is the root mean square of the differences of projections, but at least the difference of the
        norms. Without projections, it is at least the difference of the sums divided by ``sqrt(n)``, because sums of
        ``n`` elements differ by at most ``sqrt(n)`` times the norm of the difference.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.where(self.numbers == other.numbers, 0.0, np.abs(self.numbers - other.numbers))
            apart = float(off[NORM]) if self.both_have(NORM, other) else 0.0
            if self.both_have(PROJECTED.start, other):
                apart = max(apart, float(np.sqrt(np.mean(off[PROJECTED] ** 2))))
            elif self.both_have(SUM, other):
                apart = max(apart, float(off[SUM]) / np.sqrt(max(self.size, 1)))
        return np.inf if np.isnan(apart) else apart

    @property
    def rounding(self) -> float:
        """Relative rounding error of a norm that another tool computed in the tensor's dtype, summed in any order."""
        if self.known is None or LARGEST not in self.known:  # hashes are computed in float64
            return 0.0
        return float(2.0**-24 * np.sqrt(max(self.size, 1)) + _OF_STATISTICS.get(self.dtype, 0.0))


@functools.lru_cache(maxsize=64)
def signs(name: str, count: int) -> Any:
    """Return random signs as float32, equal on every machine: ``count`` for rows, ``PROJECTIONS x count`` for columns.

    Args:
        name: ``rows`` or ``columns``.
        count: number of signs; a smaller count gives the first signs of a larger one.
    """
    streams = np.arange(PROJECTIONS, dtype=np.uint64)[:, None] if name == "columns" else np.array([[16]], np.uint64)
    with np.errstate(over="ignore"):
        state = (streams << np.uint64(40)) + np.arange(1, count + 1, dtype=np.uint64)
        state *= np.uint64(_SEED)  # splitmix64
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    drawn = np.where(state >> np.uint64(63), np.float32(-1), np.float32(1))
    return drawn if name == "columns" else drawn[0]


def grid(size: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor of ``size`` elements as a matrix; the rest is one more row."""
    columns = min(_MOST_COLUMNS, max(1, size // _ROWS))
    return size // columns, columns


def places(size: int) -> tuple[int, ...]:
    """Return the indices of the elements in a fingerprint: the first, the last, and two in between."""
    drawn = [((_SEED * (size + number) & _MASK) >> 20) % size for number in range(ELEMENTS - 2)]
    return (0, *drawn, size - 1)


def fingerprint_of(array: Any, dtype: str = "") -> Fingerprint:
    """Return the fingerprint of a NumPy array of any shape.

    Args:
        array: floating-point, complex, integer or boolean array; half precision as float32.
        dtype: dtype to which the elements were rounded, if the array's dtype is wider.
    """
    array = np.asarray(array)
    name = dtype or array.dtype.name
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    flat = flat.astype(np.float64 if flat.dtype.kind != "f" or flat.dtype.itemsize > 4 else np.float32, copy=False)
    return Fingerprint(numbers_of(flat), array.shape, name)


def numbers_of(flat: Any) -> Any:
    """Return the numbers of a fingerprint.

    Args:
        flat: float32 or float64 array of one dim.
    """
    found = np.zeros(len(NUMBERS))
    if not flat.size:
        return found
    with np.errstate(invalid="ignore", over="ignore"):
        if flat.size <= _SMALL:
            wide = flat.astype(np.float64)
            found[SUM], *found[PROJECTED] = wide @ _vectors(flat.size)
            found[NORM], found[LEAST], found[LARGEST] = np.sqrt(wide @ wide), wide.min(), wide.max()
        else:
            _in_chunks(flat, found)
        if not np.isfinite(found[NORM]):
            found[NOT_FINITE] = flat.size - np.count_nonzero(np.isfinite(flat))
            wide = flat.astype(np.float64)
            found[NORM] = np.sqrt(wide @ wide)
    found[CHOSEN] = flat[_indices(flat.size)]
    return found


def _in_chunks(flat: Any, found: Any) -> None:
    """Fill in all numbers except elements, in several passes over chunks that fit in the cache."""
    rows, columns = grid(flat.size)
    weights = _row_weights(rows + 1, flat.dtype.char)
    square, summed, ends = 0.0, np.zeros((2, columns)), []
    main = flat[: rows * columns].reshape(rows, columns)
    for start in range(0, rows, _CHUNK):
        chunk = main[start : start + _CHUNK]
        line = chunk.reshape(-1)
        square += float(line @ line)
        ends += [np.minimum.reduce(line), np.maximum.reduce(line)]
        summed += weights[:, start : start + len(chunk)] @ chunk
    rest = flat[rows * columns :].astype(np.float64)
    if rest.size:
        square += float(rest @ rest)
        ends += [rest.min(), rest.max()]
        summed[:, : rest.size] += weights[:, rows, None] * rest
    found[NORM], found[SUM] = np.sqrt(square), summed[0].sum()
    found[LEAST], found[LARGEST] = np.minimum.reduce(ends), np.maximum.reduce(ends)
    found[PROJECTED] = _column_signs(columns) @ summed[1]


@functools.lru_cache(maxsize=64)
def _row_weights(rows: int, dtype: str) -> Any:
    """Return a row of ones and a row of signs; one matrix product with them gives sums and projections."""
    return np.stack([np.ones(rows, dtype), signs("rows", rows).astype(dtype)])


@functools.lru_cache(maxsize=64)
def _column_signs(columns: int) -> Any:
    return signs("columns", columns).astype(np.float64)


@functools.lru_cache(maxsize=256)
def _vectors(size: int) -> Any:
    """Return ones and the projection vectors of small tensors, one column each."""
    rows, columns = grid(size)
    row_signs, column_signs = signs("rows", rows + 1), signs("columns", columns)
    vectors = (row_signs[:, None] * column_signs[:, None, :]).reshape(PROJECTIONS, -1)[:, :size]
    return np.concatenate([np.ones((1, size)), vectors]).T.astype(np.float64)


@functools.lru_cache(maxsize=4096)
def _indices(size: int) -> Any:
    return np.array(places(size))


def tolerance(allowed: Any, one: Fingerprint) -> Any:
    """Return the tolerance of each number of a fingerprint, as a float64 array.

    Args:
        allowed: tolerance of each element, in the shape of the tensor; for complex numbers, tolerance of the modulus.
        one: the fingerprint of the tensor.
    """
    each = np.asarray(allowed, dtype=np.float64).reshape(-1)
    if not each.size:
        return np.zeros(len(NUMBERS))
    if one.dtype.startswith("complex"):
        each = np.repeat(each, 2)
    absolute, square, most = float(each.sum()), float(np.sqrt(np.square(each).sum())), float(each.max())
    projected = min(absolute, TIMES * square)
    unit = 0.0 if one.is_exact else 2.0**-53 if one.dtype in ("float64", "complex128") else 2.0**-24
    own = unit * (one.norm if np.isfinite(one.norm) else 0.0)  # rounding of the numbers themselves
    numbers = [square + _OF_NORM * own, absolute + _OF_SUM * np.sqrt(each.size) * own, most, most, 0.0]
    projections = [projected + _OF_PROJECTION * own] * PROJECTIONS
    return np.array([*numbers, *projections, *each[list(places(each.size))]], dtype=np.float64)

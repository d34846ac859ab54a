"""Samples made concrete: sizes for their letters, NumPy arrays for their operands.

Every filled sample exists twice: once with small integers, where an exact operator must be right to the bit and ties
abound, and once with real numbers.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.shard.sample import DType, Sample, Size, Value

__all__ = ["FilledSample", "Slot", "fill", "seed_of", "size_choices", "substitute"]

# Sizes for the letters of a sample, in the order in which they appear. No two alike; on axes of 2 to 6 ranks they
# leave even, uneven, short, single and empty pieces.
_FIRST = (
    (5, 3, 7, 2, 4, 6),
    (4, 6, 2, 5, 3, 7),
    (1, 5, 3, 4, 2, 6),
    (6, 1, 5, 3, 4, 2),
    (3, 8, 1, 6, 5, 2),
    (12, 4, 3, 1, 2, 5),
)
_LARGEST = 9  # twice the largest number of ranks along an axis, and one


@dataclass(frozen=True)
class Slot:
    """Stands in filled arguments for operand number ``index``."""

    index: int


@dataclass(frozen=True)
class FilledSample:
    """One call with values.

    Attributes:
        args: positional arguments with :class:`Slot` for operands.
        kwargs: keyword arguments likewise.
        arrays: operand values.
        wanted: which operands get a gradient.
        sizes: the letters' sizes, for messages.
        integral: all floating values are small integers.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrays: tuple[Any, ...]
    wanted: tuple[bool, ...]
    sizes: dict[str, int]
    integral: bool


def size_choices(sample: Sample, count: int) -> list[dict[str, int]]:
    """Up to ``count`` different sizes for the letters of ``sample``; one empty choice where it has none."""
    letters = _letters(sample)
    if not letters:
        return [{}]
    found = itertools.chain((one[: len(letters)] for one in _FIRST), _drawn(len(letters)))
    unique: dict[tuple[int, ...], None] = {}
    for one in itertools.islice(found, 50 * count):
        unique.setdefault(tuple(one))
        if len(unique) == count:
            break
    return [dict(zip(letters, one, strict=True)) for one in unique]


def _drawn(count: int) -> Iterator[tuple[int, ...]]:
    rng = np.random.default_rng(count)
    while True:
        yield tuple(int(one) + 1 for one in rng.permutation(_LARGEST)[:count])


def seed_of(*what: Any) -> int:
    """A seed that depends on ``what`` and on nothing else."""
    return zlib.crc32(repr(what).encode())


def fill(
    sample: Sample, sizes: dict[str, int], dtype: str, seed: int, *, integral: bool, to_dtype: Any
) -> FilledSample | None:
    """The sample with values; None where it has no integral form.

    Args:
        sample: the call.
        sizes: of its letters.
        dtype: NumPy's name of the floating dtype.
        seed: of the values.
        integral: small integers instead of real numbers.
        to_dtype: turns the name of a dtype into the framework's own.
    """
    rng = np.random.default_rng([seed, integral])
    arrays: list[Any] = []
    wanted: list[bool] = []

    def one(value: Any) -> Any:
        if isinstance(value, Value):
            arrays.append(_array(value, sizes, np.dtype(dtype), rng, integral=integral))
            wanted.append(value.grad and arrays[-1] is not None and arrays[-1].dtype.kind in "fc")
            return Slot(len(arrays) - 1)
        if isinstance(value, Size):
            return _product(value.letters, sizes) + value.plus
        if isinstance(value, DType):
            return to_dtype(value.name)
        return value

    args = tuple(substitute(value, one) for value in sample.args)
    kwargs = {name: substitute(value, one) for name, value in sample.kwargs.items()}
    if any(array is None for array in arrays):
        return None
    return FilledSample(args, kwargs, tuple(arrays), tuple(wanted), sizes, integral)


def substitute(tree: Any, one: Callable[[Any], Any]) -> Any:
    """``tree`` with ``one`` applied to the leaves of nested lists, tuples, dicts and slices."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([substitute(item, one) for item in tree])
    if isinstance(tree, dict):
        return {name: substitute(item, one) for name, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(substitute(item, one) for item in (tree.start, tree.stop, tree.step)))
    return one(tree)


def _letters(sample: Sample) -> list[str]:
    """In the order in which they appear."""
    found: list[Any] = []

    def keep(leaf: Any) -> None:
        if isinstance(leaf, Value):
            found.extend(leaf.shape)
            found.extend(leaf.high if isinstance(leaf.high, str) else "")
        elif isinstance(leaf, Size):
            found.extend(leaf.letters)

    substitute((sample.args, sample.kwargs), keep)
    return list(dict.fromkeys(one for one in found if isinstance(one, str) and one.isalpha()))


def _product(letters: str, sizes: dict[str, int]) -> int:
    return math.prod(int(one) if one.isdigit() else sizes[one] for one in letters)


def _array(value: Value, sizes: dict[str, int], dtype: Any, rng: Any, *, integral: bool) -> Any:
    shape = tuple(sizes[one] if isinstance(one, str) else one for one in value.shape)
    high = _product(value.high, sizes) if isinstance(value.high, str) else value.high
    if value.kind == "booleans":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    if value.kind == "integers":
        return np.asarray(rng.integers(int(value.low), max(int(high), int(value.low) + 1), shape), np.int64)
    if value.kind == "shuffled":
        return _shuffled(shape, int(high), value.dim, rng)
    if value.kind == "complex":
        real, imaginary = (_real(shape, rng, integral=integral) for _ in range(2))
        return np.asarray(real + 1j * imaginary).astype(np.result_type(dtype, np.complex64))
    if value.kind == "between":
        found = _between(shape, value.low, float(high), rng, integral=integral)
        return None if found is None else np.asarray(found, dtype)
    found = np.asarray(_real(shape, rng, integral=integral), dtype)
    found = np.sort(found, -1) if value.kind == "ordered" else found
    return _nonfinite(found, rng, integral=integral) if value.kind == "nonfinite" else found


def _real(shape: Sequence[int], rng: Any, *, integral: bool) -> Any:
    return rng.integers(-4, 5, shape).astype(float) if integral else rng.standard_normal(shape)


def _between(shape: Sequence[int], low: float, high: float, rng: Any, *, integral: bool) -> Any:
    if not integral:
        return rng.uniform(low, high, shape)
    first, last = math.ceil(low), math.floor(high)
    return rng.integers(first, last + 1, shape) if first < last else None


def _nonfinite(array: Any, rng: Any, *, integral: bool) -> Any:
    """Every fourth element is out of the ordinary; zeros only where no summand rounds, for operators bend there."""
    flat = array.reshape(-1)
    strange = (np.inf, -np.inf, np.nan, *((-0.0, 0.0) if integral else ()))
    for place, index in enumerate(rng.permutation(flat.size)[: -(-flat.size // 4)]):
        flat[index] = strange[place % len(strange)]
    return array


def _shuffled(shape: Sequence[int], high: int, dim: int, rng: Any) -> Any:
    found = np.empty(shape, np.int64)
    lines = np.moveaxis(found, dim, -1)
    if lines.shape[-1] > high:
        msg = f"{lines.shape[-1]} indices along dim {dim}, of which no two are equal, are not below {high}"
        raise ValueError(msg)
    for index in np.ndindex(*lines.shape[:-1]):
        lines[index] = rng.permutation(high)[: lines.shape[-1]]
    return found

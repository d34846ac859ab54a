"""Fills samples with values: sizes for the letters in their shapes, NumPy arrays for their operands.

Every sample is filled twice: with small integers, for which ties are frequent and results of exact operators must be
bitwise correct, and with real numbers.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel._tree import CONTAINERS, tree_map
from hyper_parallel.core.shard.sample import DType, Sample, Size, Value

__all__ = ["FilledSample", "Slot", "fill", "seed_of", "size_choices", "substitute"]

# Choices of sizes for the letters of a sample, in the order in which the letters appear. Within a choice, all sizes
# differ. On axes of 2 to 6 ranks, the choices give even, uneven, single-element and empty shards.
_FIRST_SIZES = (
    (5, 3, 7, 2, 4, 6),
    (4, 6, 2, 5, 3, 7),
    (1, 5, 3, 4, 2, 6),
    (6, 1, 5, 3, 4, 2),
    (3, 8, 1, 6, 5, 2),
    (12, 4, 3, 1, 2, 5),
)
_LARGEST_SIZE = 9  # twice the largest number of ranks along an axis, plus one


@dataclass(frozen=True)
class Slot:
    """A placeholder for operand number ``index`` in a sample's arguments."""

    index: int


@dataclass(frozen=True)
class FilledSample:
    """A sample call of an operator, with values.

    Attributes:
        args: positional arguments with :class:`Slot` for operands.
        kwargs: keyword arguments, in the same form.
        arrays: values of the operands.
        requires_grad: per operand, whether its gradient is compared.
        sizes: sizes of the letters in the sample's shapes, for messages.
        integral: whether all floating-point values are small integers.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrays: tuple[Any, ...]
    requires_grad: tuple[bool, ...]
    sizes: dict[str, int]
    integral: bool

    def with_operands(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``operands`` in their places."""

        def operand_of(leaf: Any) -> Any:
            return operands[leaf.index] if isinstance(leaf, Slot) else leaf

        args: tuple[Any, ...] = substitute(self.args, operand_of)
        return args, substitute(self.kwargs, operand_of)


def size_choices(sample: Sample, count: int) -> list[dict[str, int]]:
    """Return up to ``count`` choices of sizes for the letters of ``sample``; one empty choice if it has no letters."""
    letters = _letters(sample)
    if not letters:
        return [{}]
    candidates = itertools.chain((sizes[: len(letters)] for sizes in _FIRST_SIZES), _random_sizes(len(letters)))
    unique: dict[tuple[int, ...], None] = {}
    for sizes in itertools.islice(candidates, 50 * count):
        unique.setdefault(tuple(sizes))
        if len(unique) == count:
            break
    return [dict(zip(letters, sizes, strict=True)) for sizes in unique]


def _random_sizes(count: int) -> Iterator[tuple[int, ...]]:
    rng = np.random.default_rng(count)
    while True:
        yield tuple(int(number) + 1 for number in rng.permutation(_LARGEST_SIZE)[:count])


def seed_of(*values: Any) -> int:
    """Return a seed that depends only on ``values``."""
    return zlib.crc32(repr(values).encode())


def fill(
    sample: Sample, sizes: dict[str, int], dtype: str, seed: int, *, integral: bool, to_dtype: Any, rng: Any = None
) -> FilledSample | None:
    """Return the sample with values; None if ``integral`` is set but the sample has no integral form.

    Args:
        sample: the call.
        sizes: sizes of the letters in the sample's shapes.
        dtype: NumPy's name of the floating dtype.
        seed: seed of the values.
        integral: whether values are small integers instead of real numbers.
        to_dtype: converts the name of a dtype to the framework's dtype.
        rng: generator to use instead of ``seed``, with the methods of NumPy's generators.
    """
    rng = np.random.default_rng([seed, integral]) if rng is None else rng
    arrays: list[Any] = []
    requires_grad: list[bool] = []

    def fill_leaf(value: Any) -> Any:
        if isinstance(value, Value):
            arrays.append(_array(value, sizes, np.dtype(dtype), rng, integral=integral))
            requires_grad.append(value.grad and arrays[-1] is not None and arrays[-1].dtype.kind in "fc")
            return Slot(len(arrays) - 1)
        if isinstance(value, Size):
            return _product(value.letters, sizes) + value.plus
        if isinstance(value, DType):
            return to_dtype(value.name)
        return value

    args = tuple(substitute(value, fill_leaf) for value in sample.args)
    kwargs = {name: substitute(value, fill_leaf) for name, value in sample.kwargs.items()}
    if any(array is None for array in arrays):
        return None
    return FilledSample(args, kwargs, tuple(arrays), tuple(requires_grad), sizes, integral)


def substitute(tree: Any, replace_leaf: Callable[[Any], Any]) -> Any:
    """Return ``tree`` with ``replace_leaf`` applied to the leaves of nested lists, tuples, dicts and slices."""

    def replace_parts(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(replace_leaf(part) for part in (leaf.start, leaf.stop, leaf.step)))
        return replace_leaf(leaf)

    return tree_map(replace_parts, tree, CONTAINERS)


def _letters(sample: Sample) -> list[str]:
    """Return the letters of a sample in the order in which they appear."""
    dims: list[Any] = []

    def collect(leaf: Any) -> None:
        if isinstance(leaf, Value):
            dims.extend(leaf.shape)
            dims.extend(leaf.high if isinstance(leaf.high, str) else "")
        elif isinstance(leaf, Size):
            dims.extend(leaf.letters)

    substitute((sample.args, sample.kwargs), collect)
    return list(dict.fromkeys(dim for dim in dims if isinstance(dim, str) and dim.isalpha()))


def _product(letters: str, sizes: dict[str, int]) -> int:
    return math.prod(int(letter) if letter.isdigit() else sizes[letter] for letter in letters)


def _array(value: Value, sizes: dict[str, int], dtype: Any, rng: Any, *, integral: bool) -> Any:
    shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in value.shape)
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
        numbers = _between(shape, value.low, float(high), rng, integral=integral)
        return None if numbers is None else np.asarray(numbers, dtype)
    array = np.asarray(_real(shape, rng, integral=integral), dtype)
    array = np.sort(array, -1) if value.kind == "ordered" else array
    return _nonfinite(array, rng, integral=integral) if value.kind == "nonfinite" else array


def _real(shape: Sequence[int], rng: Any, *, integral: bool) -> Any:
    return rng.integers(-4, 5, shape).astype(float) if integral else rng.standard_normal(shape)


def _between(shape: Sequence[int], low: float, high: float, rng: Any, *, integral: bool) -> Any:
    if not integral:
        return rng.uniform(low, high, shape)
    first, last = math.ceil(low), math.floor(high)
    return rng.integers(first, last + 1, shape) if first < last else None


def _nonfinite(array: Any, rng: Any, *, integral: bool) -> Any:
    """Replace every fourth element by an infinity, NaN or, for integers, zero.

    Real numbers get no zeros: many operators have a kink at 0, where rounding of partial values changes the gradient.
    """
    flat = array.reshape(-1)
    special = (np.inf, -np.inf, np.nan, *((-0.0, 0.0) if integral else ()))
    for position, index in enumerate(rng.permutation(flat.size)[: -(-flat.size // 4)]):
        flat[index] = special[position % len(special)]
    return array


def _shuffled(shape: Sequence[int], high: int, dim: int, rng: Any) -> Any:
    array = np.empty(shape, np.int64)
    lines = np.moveaxis(array, dim, -1)
    if lines.shape[-1] > high:
        msg = f"dim {dim} needs {lines.shape[-1]} different indices, and there are only {high}"
        raise ValueError(msg)
    for index in np.ndindex(*lines.shape[:-1]):
        lines[index] = rng.permutation(high)[: lines.shape[-1]]
    return array

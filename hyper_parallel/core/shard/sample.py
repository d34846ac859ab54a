"""Sample calls for verifying rules, declared next to each rule.

A sample describes the values of its operands and names their sizes by letters: ``sample("matmul", real("mk"),
real("kn"))``. The verifier assigns distinct sizes to the letters, some of them 1, indivisible or smaller than the
number of ranks, so one line covers many shapes. This file creates no arrays and imports no array library.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = [
    "DType",
    "Sample",
    "Size",
    "Value",
    "between",
    "booleans",
    "complex_",
    "dtype",
    "exempt",
    "exemption",
    "indices",
    "integers",
    "nonfinite",
    "ordered",
    "real",
    "sample",
    "sample_call",
    "samples_of",
    "shuffled",
    "size",
]

Dims = str | int
Shape = tuple[Dims, ...]


@dataclass(frozen=True)
class Value:
    """Description of an operand: its kind of values, and its shape in letters and numbers.

    Attributes:
        kind: ``real``, ``ordered``, ``between``, ``integers``, ``booleans``, ``shuffled``, ``nonfinite``, ``complex``.
        shape: a letter or a number per dim.
        low: smallest value.
        high: largest value; for integers, the first value above the range. Letters mean the product of their sizes.
        dim: the dim along which no two shuffled integers are equal.
        grad: whether its gradient is compared; integers and booleans have none.
    """

    kind: str
    shape: Shape
    low: float = 0
    high: float | str = 0
    dim: int = 0
    grad: bool = True

    @property
    def fixed(self) -> Value:
        """The same operand without a gradient, because the frameworks do not compute one for it."""
        return replace(self, grad=False)


@dataclass(frozen=True)
class Size:
    """An argument that is the product of the sizes of some letters, plus a number."""

    letters: str
    plus: int = 0


@dataclass(frozen=True)
class DType:
    """An argument that is the framework's dtype of this name."""

    name: str


@dataclass(frozen=True)
class Sample:
    """One call of a canonical operator.

    Attributes:
        args: positional arguments; :class:`Value`, :class:`Size` and :class:`DType` are filled in.
        kwargs: keyword arguments, in the same form.
        writes: the first operand is written, and is the result.
        random: the result is random, and must equal what a single rank samples.
        constant: whether the result may be the same for all inputs.
        uninitialized: only the shape and dtype of the result are defined, not its values.
        exact: the operator never rounds, so results are compared bit by bit.
        dtypes: floating dtypes to try, in order; the first for which the framework has kernels is used.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    writes: bool = False
    random: bool = False
    constant: bool = False
    uninitialized: bool = False
    exact: bool = False
    dtypes: tuple[str, ...] = ("float64", "float32")


def real(*shape: Dims) -> Value:
    """Describe an operand of real numbers between -2 and 2: ``real("ab")``, ``real(4, 1, "b")``."""
    return Value("real", _shape(shape), -2.0, 2.0)


def ordered(*shape: Dims) -> Value:
    """Numbers of either sign, ascending along the last dim."""
    return Value("ordered", _shape(shape), -2.0, 2.0)


def between(low: float, high: float, *shape: Dims) -> Value:
    """Numbers from ``low`` to ``high``."""
    return Value("between", _shape(shape), low, high)


def nonfinite(*shape: Dims) -> Value:
    """Numbers of either sign, among them both infinities, both zeros and NaN."""
    return Value("nonfinite", _shape(shape), -2.0, 2.0)


def integers(low: int, high: int, *shape: Dims) -> Value:
    """Integers from ``low`` to below ``high``."""
    return Value("integers", _shape(shape), low, high)


def indices(below: int | str, *shape: Dims) -> Value:
    """Indices: integers from 0 to below a number, or below the size of a letter."""
    return Value("integers", _shape(shape), 0, below)


def shuffled(below: int | str, *shape: Dims, dim: int = 0) -> Value:
    """Indices of which no two along ``dim`` are equal."""
    return Value("shuffled", _shape(shape), 0, below, dim)


def booleans(*shape: Dims) -> Value:
    """Boolean values."""
    return Value("booleans", _shape(shape))


def complex_(*shape: Dims) -> Value:
    """Complex numbers."""
    return Value("complex", _shape(shape), -2.0, 2.0)


def size(letters: str, plus: int = 0) -> Size:
    """An argument: the product of the letters' sizes, plus a number."""
    return Size(letters, plus)


def dtype(name: str) -> DType:
    """An argument: the framework's dtype ``name``."""
    return DType(name)


def _shape(dims: tuple[Dims, ...]) -> Shape:
    expanded: list[Dims] = []
    for dim in dims:
        expanded.extend(
            [dim] if isinstance(dim, int) else [int(letter) if letter.isdigit() else letter for letter in dim]
        )
    return tuple(expanded)


_SAMPLES: dict[str, list[Sample]] = {}
_EXEMPT: dict[str, str] = {}
_LOCK = threading.Lock()


def sample(ops: str, /, *args: Any, **kwargs: Any) -> None:
    """Add one call to the samples of each operator in ``ops``, with the arguments in the rule's own names."""
    sample_call(ops, Sample(args, kwargs))


def sample_call(ops: str, call: Sample) -> None:
    """Add a call with properties beyond its arguments: it writes in place, is random, or may return constants."""
    with _LOCK:
        for op in ops.split():
            _SAMPLES.setdefault(op, []).append(call)


def samples_of(op: str) -> tuple[Sample, ...]:
    """The samples of canonical operator ``op``, as declared."""
    return tuple(_SAMPLES.get(op, ()))


def exempt(op: str, reason: str) -> None:
    """Record why ``op`` cannot have samples; the verifier lists the reason."""
    with _LOCK:
        _EXEMPT[op] = reason


def exemption(op: str) -> str:
    """Return the reason why ``op`` has no samples, or ``""``."""
    return _EXEMPT.get(op, "")

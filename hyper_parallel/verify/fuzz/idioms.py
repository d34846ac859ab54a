"""Common idioms other than operator calls: views, indexing, arithmetic, in-place writes, redistribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.shard.sample import DType

if TYPE_CHECKING:
    import numpy as np

    from hyper_parallel.verify.fuzz.language import Language

__all__ = ["ARITHMETIC", "MOVE", "VIEWS", "WRITES", "Idiom", "adapted", "arithmetic", "served", "view", "write"]

MOVE = "redistribute"
"""The name of a step that redistributes a copy; on one device it only copies."""


class Idiom(NamedTuple):
    """One call: its name and its arguments, with operands as they were passed."""

    call: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Operand(NamedTuple):
    """A tensor as the operand of an idiom.

    Attributes:
        ref: placeholder for the tensor in the arguments.
        shape: shape of the tensor.
        rng: random number generator.
        language: language that the idiom is written in.
    """

    ref: Any
    shape: tuple[int, ...]
    rng: np.random.Generator
    language: Language

    def dim(self) -> int:
        """Return a random dim, counted from either end."""
        ndim = len(self.shape)
        return int(self.rng.integers(-ndim, ndim))

    def number(self) -> float:
        """Return a random number, other than 0 and 1."""
        return float(self.rng.choice([-2.0, -1.0, 0.5, 2.0, 3.0]))

    def call(self, function: str, *args: Any) -> Idiom:
        """Return a call of a function of the framework."""
        return _call(self.language.FUNCTIONS[function], *args)


def _call(name: str, *args: Any, **kwargs: Any) -> Idiom:
    return Idiom(name, args, kwargs)


def _slice(x: Operand) -> Idiom:
    index = []
    for size in x.shape[: 1 + int(x.rng.integers(len(x.shape)))]:
        start, stop = sorted(int(bound) for bound in x.rng.integers(0, size + 1, 2))
        index.append(slice(start or None, stop if stop < size else None, int(x.rng.choice([1, 1, 2]))))
    return _call("operator.getitem", x.ref, tuple(index) if len(index) > 1 else index[0])


def _reshape(x: Operand) -> Idiom:
    first, rest = (x.shape[0], x.shape[1:]) if x.shape else (1, ())
    for factor in (2, 3, 5):
        if first and first % factor == 0:
            return _call("Tensor.reshape", x.ref, factor, first // factor, *rest)
    return _call("Tensor.reshape", x.ref, -1) if 0 not in x.shape else _call("Tensor.reshape", x.ref, (0,))


def _permute(x: Operand) -> Idiom:
    return _call("Tensor.permute", x.ref, *(int(dim) for dim in x.rng.permutation(len(x.shape))))


def _index(x: Operand) -> Idiom:
    size = x.shape[0]
    return _call("operator.getitem", x.ref, int(x.rng.integers(-size, size)) if size else slice(None))


def _index_last(x: Operand) -> Idiom:
    size = x.shape[-1]
    return _call("operator.getitem", x.ref, (..., int(x.rng.integers(-size, size)) if size else None))


def _narrow(x: Operand) -> Idiom:
    dim = x.dim()
    start, stop = sorted(int(bound) for bound in x.rng.integers(0, x.shape[dim] + 1, 2))
    return _call("Tensor.narrow", x.ref, dim, start, stop - start)


def _expand(x: Operand) -> Idiom:
    return _call("Tensor.expand", x.ref, int(x.rng.integers(1, 4)), *x.shape)


VIEWS: dict[str, tuple[int, Callable[[Operand], Idiom]]] = {
    # name: minimum number of dims of the operand, and the call
    "slice": (1, _slice),
    "index": (1, _index),
    "last index": (1, _index_last),
    "new dim": (0, lambda x: _call("operator.getitem", x.ref, (None, ...))),
    "reshape": (1, _reshape),
    "view": (0, lambda x: _call("Tensor.view", x.ref, *x.shape, 1)),
    "flatten": (0, lambda x: _call("Tensor.flatten", x.ref)),
    "flatten two": (2, lambda x: _call("Tensor.flatten", x.ref, 0, 1)),
    "transpose": (2, lambda x: _call("Tensor.transpose", x.ref, x.dim(), x.dim())),
    "permute": (1, _permute),
    "unsqueeze": (0, lambda x: _call("Tensor.unsqueeze", x.ref, int(x.rng.integers(0, len(x.shape) + 1)))),
    "squeeze": (0, lambda x: _call("Tensor.squeeze", x.ref)),
    "narrow": (1, _narrow),
    "expand": (0, _expand),
    "chunk": (1, lambda x: _call("Tensor.chunk", x.ref, 2, x.dim())),
    "split": (1, lambda x: _call("Tensor.split", x.ref, int(x.rng.integers(1, 4)), x.dim())),
    "unbind": (1, lambda x: _call("Tensor.unbind", x.ref, 0)),
    "swap": (2, lambda x: _call("Tensor.swapaxes", x.ref, 0, -1)),
}
"""Calls that return a slice of a tensor, or the tensor in a different shape."""

ARITHMETIC: dict[str, Callable[[Operand, Any], Idiom]] = {
    # the second operand is a tensor of the same shape
    "scale": lambda x, _: _call("operator.mul", x.ref, x.number()),
    "from number": lambda x, _: _call("operator.sub", 1, x.ref),
    "divide": lambda x, _: _call("operator.truediv", x.ref, 2),
    "square": lambda x, _: _call("operator.pow", x.ref, 2),
    "negate": lambda x, _: _call("operator.neg", x.ref),
    "add": lambda x, y: _call("operator.add", x.ref, y),
    "subtract": lambda x, y: _call("operator.sub", x.ref, y),
    "multiply": lambda x, y: _call("operator.mul", x.ref, y),
    "less": lambda x, y: _call("operator.lt", x.ref, y),
    "positive": lambda x, _: _call("operator.ge", x.ref, 0),
    "sum": lambda x, _: _call("Tensor.sum", x.ref),
    "mean": lambda x, _: _call("Tensor.mean", x.ref),
    "sum of dim": lambda x, _: _call("Tensor.sum", x.ref, x.dim()) if x.shape else _call("Tensor.sum", x.ref),
    "mean of dim": lambda x, _: _call("Tensor.mean", x.ref, -1, True) if x.shape else _call("Tensor.mean", x.ref),
    "to float64": lambda x, _: _call("Tensor.to", x.ref, DType("float64")),
    "to float32": lambda x, _: _call("Tensor.to", x.ref, DType("float32")),
    "to half": lambda x, _: _call("Tensor.to", x.ref, DType(x.language.DTYPES[-1])),
    "clone": lambda x, _: _call("Tensor.clone", x.ref),
    "contiguous": lambda x, _: _call("Tensor.contiguous", x.ref),
    "detach": lambda x, _: _call("Tensor.detach", x.ref),
    "concatenate": lambda x, y: x.call("cat", [x.ref, y], -1) if x.shape else x.call("stack", [x.ref, y]),
    "stack": lambda x, y: x.call("stack", [x.ref, y]),
    "maximum": lambda x, y: x.call("maximum", x.ref, y),
}
"""Calls on two tensors of the same shape and dtype."""

WRITES: dict[str, Callable[[Operand, Any], Idiom]] = {
    "add": lambda x, y: _call("Tensor.add_", x.ref, y),
    "add scaled": lambda x, y: _call("Tensor.add_", x.ref, y, alpha=2),
    "increment": lambda x, y: _call("operator.iadd", x.ref, y),
    "scale": lambda x, _: _call("operator.imul", x.ref, 2),
    "multiply": lambda x, y: _call("Tensor.mul_", x.ref, y),
    "subtract number": lambda x, _: _call("operator.isub", x.ref, x.number()),
    "relu": lambda x, _: _call("Tensor.relu_", x.ref),
    "clamp": lambda x, _: _call("Tensor.clamp_", x.ref, min=-1, max=2),
    "zero": lambda x, _: _call("Tensor.zero_", x.ref),
    "fill": lambda x, _: _call("Tensor.fill_", x.ref, x.number()),
    "copy": lambda x, y: _call("Tensor.copy_", x.ref, y),
    "negate": lambda x, _: _call("Tensor.neg_", x.ref),
    "set first": lambda x, _: _call("operator.setitem", x.ref, 0 if x.shape and x.shape[0] else ..., x.number()),
    "set last": lambda x, _: _call(
        "operator.setitem", x.ref, (..., -1) if x.shape and x.shape[-1] else ..., x.number()
    ),
    "set all": lambda x, y: _call("operator.setitem", x.ref, ..., y),
}
"""Calls that write a tensor; some of them read a second tensor of the same shape and dtype."""


def served(kind: str, names: Iterable[str], language: Language) -> list[str]:
    """Return the idioms among ``names`` that a language supports."""
    return [name for name in names if f"{kind} {name}" not in language.LEFT_OUT]


def _drawn(kind: str, names: Iterable[str], rng: np.random.Generator, language: Language) -> str:
    names = served(kind, names, language)
    return names[int(rng.integers(len(names)))]


def view(ref: Any, shape: tuple[int, ...], rng: np.random.Generator, language: Language) -> Idiom:
    """Return a random view of a tensor."""
    fitting = [name for name, (least, _) in VIEWS.items() if len(shape) >= least]
    return VIEWS[_drawn("view", fitting, rng, language)][1](Operand(ref, shape, rng, language))


def arithmetic(ref: Any, other: Any, shape: tuple[int, ...], rng: np.random.Generator, language: Language) -> Idiom:
    """Return random arithmetic on two tensors of the same shape."""
    name = _drawn("arithmetic", ARITHMETIC, rng, language)
    return ARITHMETIC[name](Operand(ref, shape, rng, language), other)


def write(ref: Any, other: Any, shape: tuple[int, ...], rng: np.random.Generator, language: Language) -> Idiom:
    """Return a random write into a tensor."""
    return WRITES[_drawn("write", WRITES, rng, language)](Operand(ref, shape, rng, language), other)


def adapted(ref: Any, shape: tuple[int, ...], ndim: int, rng: np.random.Generator) -> Idiom:
    """Return a view with ``ndim`` dims, or, if that takes several views, with one dim more or fewer than the tensor."""
    if len(shape) < ndim:
        return _call("Tensor.unsqueeze", ref, int(rng.integers(0, len(shape) + 1)))
    if ndim == 0 or rng.random() < 1 / 2:
        size = shape[0]
        return _call("operator.getitem", ref, int(rng.integers(size)) if size else slice(None))
    return _call("Tensor.flatten", ref, 0, 1)

"""Returns sizes of traced tensors, and labels of dims that broadcast, for the descriptions of ATen functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.verify.frameworks.contract.sizes import Size

__all__ = ["Describe", "Labels", "argument", "broadcast", "in_words", "numbers_of", "shape_of", "size_of", "sizes_of"]

Labels = tuple[int | None, ...]
Describe = Callable[[str, Any, Any, Sequence[Tensor], Sequence[Any], Sequence[Size], int], Any]
"""A function that describes a call, given name, arguments, named arguments, operands and their shapes, and the result's
shape and index."""


def shape_of(value: Any) -> tuple[Size, ...]:
    """Return the shape of a tensor, or an empty tuple for other arguments."""
    return tuple(map(size_of, value.shape)) if isinstance(value, Tensor) else ()


def sizes_of(value: Tensor) -> tuple[int, ...]:
    """Return the sizes of a tensor, with the example value (hint) of each symbol."""
    sizes: Sequence[Any] = value.shape  # numbers or symbols, although PyTorch declares them as numbers
    return tuple(int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in sizes)


def numbers_of(value: Any) -> str:
    """Return the kind of a tensor's dtype as NumPy's letter, such as ``f``; empty for other arguments."""
    if not isinstance(value, Tensor):
        return ""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return "f" if value.dtype.is_floating_point else "c"
    return "b" if value.dtype == torch.bool else "i"


def size_of(value: Any) -> Size:
    """Return a size that is given as a number, as a symbol, or as the node of a symbol in the graph."""
    if isinstance(value, torch.fx.Node):
        value = value.meta["val"]
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _of_expression(value.node.expr)
    return Size(int(value))


def _of_expression(expression: Any) -> Size:
    if type(expression).__name__ == "ToFloat":
        expression = expression.args[0]
    number, rest = expression.as_coeff_Mul()
    powers = rest.as_powers_dict()
    if number.is_Integer and all((base.is_Symbol and power.is_Integer and power > 0) or base == 1
                                 for base, power in powers.items()):  # fmt: skip
        names = [str(base) for base, power in powers.items() if base != 1 for _ in range(int(power))]
        return Size(int(number), tuple(sorted(names)))
    return Size(0, tuple(sorted(map(str, expression.free_symbols))), str(expression))


def broadcast(shape: Sequence[Size], out: Sequence[Size]) -> Labels:
    """Return the labels of an operand that broadcasts to ``out``; the label of a dim of ``out`` is its index."""
    first = len(out) - len(shape)
    labels: list[int | None] = []
    for dim, size in enumerate(shape):
        if size == out[first + dim]:
            labels.append(first + dim)
        elif size == Size(1):
            labels.append(None)
        else:
            raise LookupError(f"size {size} where {out[first + dim]} is")
    return tuple(labels)


def argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    """Return an argument given by position or by name, or its default."""
    return args[position] if len(args) > position else kwargs.get(name, default)


_WORDS = (
    ("_Unknown", "it depends on the rank, such as on where its part starts"),
    ("data-dependent", "what it does depends on values, such as indices that it checks"),
    ("int() argument must be", "it reads values as numbers, such as the largest index"),
    ("SymIntArrayRef", "PyTorch computes its shapes only from numbers"),
    ("customized tensor", "PyTorch computes its shapes only from numbers"),
)
"""Parts of PyTorch's error messages, each with the reason that is reported instead."""


def in_words(error: Exception) -> str:
    """Return the reason why a trace failed, as one line of text."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    if text.startswith("aten.") and " " not in text:
        return f"PyTorch has no shapes of {text}"
    return next((words for part, words in _WORDS if part in text), text)

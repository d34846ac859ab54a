"""A table of the values of a program as expressions; several runs share it, and equal expressions have equal numbers.

An expression has an operator, operands, which are expressions, and the other arguments of the operator. A leaf is a
parameter, an array of the batch, or a tensor of unknown origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel._tree import leaves, unflatten
from hyper_parallel.errors import short_dtype
from hyper_parallel.verify.prove.paired import complete_text

__all__ = ["TREES", "Expression", "Expressions", "first_differences"]

TREES = (list, tuple, dict)


@dataclass(frozen=True)
class Expression:
    """One value.

    Attributes:
        name: name of the operator, or of a leaf.
        shape: global shape in the first run that has the expression, or None.
        dtype: dtype, or None.
        operands: numbers of the operands.
        func: function that is called, or None.
        args: positional and named arguments, with None in place of tensors.
        places: positions of the operands among the arguments.
        part: index of the result; for an operand that the call writes, a negative number that encodes its position.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    operands: tuple[int, ...] = ()
    func: Callable[..., Any] | None = None
    args: Any = ()
    places: tuple[int, ...] = ()
    part: int = 0

    @property
    def notation(self) -> str:
        """The value as text: dtype and shape of a call's result, or the name of a leaf."""
        return self.name if self.shape is None or self.func is None else f"{short_dtype(self.dtype)}{list(self.shape)}"


@dataclass
class Expressions:
    """The table of expressions.

    Attributes:
        items: the expressions by number; number 0 stands for no value.
    """

    items: list[Expression] = field(default_factory=lambda: [Expression("nothing")])
    _numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, expression: Expression, text: str = "") -> int:
        """Return the number of an expression.

        Args:
            expression: the expression; its shape and ``args`` are not compared, but used in messages.
            text: the arguments as text, which is compared.
        """
        key = (expression.func or expression.name, text, expression.operands, expression.part, expression.dtype)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.items)
            self.items.append(expression)
        return found

    def leaf(self, name: str, shape: Sequence[int] | None = None, dtype: Any = None) -> int:
        """Return the number of the leaf with this name, shape and dtype."""
        own = None if shape is None else tuple(map(int, shape))
        return self.number(Expression(name, own, dtype), repr(own))

    def text_of(self, number: int) -> str:
        """Return a call as text."""
        item = self.items[number]
        if item.func is None:
            return item.name
        filled = list(leaves(item.args, TREES))
        for place, each in zip(item.places, item.operands, strict=False):
            filled[place] = _Shown(self.items[each].notation)
        args, kwargs = unflatten(item.args, filled, TREES)
        shown = [complete_text(each) for each in args] + [f"{name}={each!r}" for name, each in kwargs.items()]
        return f"{item.name}({', '.join(shown)})"

    def same_call(self, one: int, other: int) -> bool:
        """Return whether two values are results of the same function and arguments, with the same number of operands.

        The operands may differ.
        """
        first, second = self.items[one], self.items[other]
        return (
            (first.func or first.name, len(first.operands), first.part, first.dtype, first.places)
            == (second.func or second.name, len(second.operands), second.part, second.dtype, second.places)
            and bool(first.operands)
            and complete_text(first.args) == complete_text(second.args)
        )


class _Shown:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def first_differences(table: Expressions, one: int, other: int) -> Iterator[tuple[int, int]]:
    """Yield the innermost pairs of subexpressions in which two expressions differ.

    A pair is innermost if its two calls differ themselves, not only in their operands.
    """
    waiting, seen = [(one, other)], {(one, other)}
    while waiting:
        pair = waiting.pop()
        if pair[0] == pair[1]:
            continue
        first, second = (table.items[each] for each in pair)
        if not table.same_call(*pair) or first.operands == second.operands:
            yield pair
            continue
        inner = list(zip(first.operands, second.operands, strict=True))
        waiting += [each for each in inner if each not in seen]
        seen.update(inner)

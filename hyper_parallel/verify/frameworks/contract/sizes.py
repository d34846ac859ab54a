"""Sizes as products of symbols, so that a statement about them is valid for every value of the symbols."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["ONE", "Size", "product"]


@dataclass(frozen=True)
class Size:
    """A number times symbols; for a size that is not a product, a formula and the symbols in it.

    Attributes:
        number: the numeric factor.
        symbols: symbols of the product, sorted; a symbol that occurs twice is squared.
        formula: text of a size that is not a product, otherwise empty.
    """

    number: int = 1
    symbols: tuple[str, ...] = ()
    formula: str = ""

    def __mul__(self, other: Size) -> Size:
        """Return the product."""
        if self.formula or other.formula:
            return Size(0, tuple(sorted({*self.symbols, *other.symbols})), f"({self})*({other})")
        return Size(self.number * other.number, tuple(sorted((*self.symbols, *other.symbols))))

    def over(self, other: Size) -> Size | None:
        """Return the quotient of this size and ``other``; None if it is not a number times symbols."""
        if self.formula or other.formula or not other.number or self.number % other.number:
            return ONE if self == other and self.formula else None
        rest = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in rest:
                return None
            rest.remove(symbol)
        return Size(self.number // other.number, tuple(rest))

    def value(self, values: Mapping[str, int]) -> int:
        """Return the value for these values of symbols; -1 if the size is not a product."""
        return -1 if self.formula else self.number * math.prod(values[symbol] for symbol in self.symbols)

    def __str__(self) -> str:
        """Return the size as text."""
        if self.formula:
            return self.formula
        return "*".join([*([str(self.number)] if self.number != 1 or not self.symbols else []), *self.symbols])


ONE = Size()


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of ``sizes``."""
    result = ONE
    for size in sizes:
        result = result * size
    return result

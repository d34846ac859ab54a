"""Checks whether a graph for general sizes is valid for sizes 0 and 1: compares it with a trace at these sizes.

In the comparison, dims of size 1 are left out of shapes and labels. Steps whose result is then their operand are left
out as well: adding or removing a dim of size 1, an expansion to size 1, a sum over one element, a product with 1.
Tensors without elements are equal if their shapes are equal.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from hyper_parallel.verify.frameworks.contract.primitives import Constant, Graph, Input, Primitive, Reshape, Step
from hyper_parallel.verify.frameworks.contract.sizes import Size

__all__ = ["at_sizes", "is_special_case", "without_special_sizes"]

_MOST = 400
"""Maximum number of steps in all traces with special sizes of one operator."""
_FACTOR = r"(?:\d+|s\d+(?:\*\*\d+)?)"
_RELATION = re.compile(
    rf"(?:Ne\((?P<ne>{_FACTOR}(?:\*{_FACTOR})*), 1\)|(?P<ge>{_FACTOR}(?:\*{_FACTOR})*) (?:>= 2|> 1))"
)
"""Matches the conditions that a product of sizes is not 1, or is at least 2."""

_MOVES = ("expand", "unsqueeze", "squeeze", "permute", "t", "transpose", "broadcast_in_dim", "select")
"""Functions that only move elements; equal descriptions mean equal results, if ``select`` reads dims of size 1."""
_REDUCTIONS = ("sum", "amax", "amin", "prod")
"""Reductions whose equal descriptions mean equal results; over a dim of size 1 they return the element itself."""
_PRODUCTS = ("mm", "bmm", "mul")
"""Functions for which the order of the two factors is not compared."""


def at_sizes(size: Size, values: Mapping[str, int]) -> Size:
    """Return a size in which some symbols have these values; a size that is not a product is returned unchanged."""
    if size.formula:
        return size
    number, rest = size.number, []
    for symbol in size.symbols:
        if symbol in values:
            number *= values[symbol]
        else:
            rest.append(symbol)
    return Size(number, tuple(rest)) if number else Size(0)


def is_special_case(graph: Graph, special: Graph, values: Mapping[str, int]) -> bool:
    """Whether ``graph`` with these values of symbols computes what ``special`` computes, forward and backward.

    Args:
        graph: a graph for general sizes.
        special: a graph that was traced with these values as numbers.
        values: the values, each 0 or 1.
    """
    known: dict[Any, int] = {}
    first, second = _Values(graph, values, known), _Values(special, {}, known)
    ends = [(each.graph.outputs, each.graph.cotangents, each.graph.gradients) for each in (first, second)]
    same_ends = all(len(one) == len(other) for one, other in zip(*ends, strict=True))
    if not same_ends or graph.no_backward or special.no_backward or len(graph.inputs) != len(special.inputs):
        return False
    for one, other in zip(graph.inputs + graph.outputs, special.inputs + special.outputs, strict=True):
        if first.shapes[one] != second.shapes[other]:
            return False
    numbered = [each.numbered() for each in (first, second)]
    wanted = [[None if at is None else numbers[at] for at in (*each.graph.outputs, *each.graph.gradients)]
              for each, numbers in zip((first, second), numbered, strict=True)]  # fmt: skip
    return wanted[0] == wanted[1] and -1 not in wanted[0]


def without_special_sizes(graph: Graph, retrace: Callable[[Mapping[str, int]], Graph | None]) -> Graph:
    """Return the graph without conditions that exclude only sizes 0 and 1 at which the graph was found to be valid.

    Args:
        graph: a graph with conditions on its sizes.
        retrace: traces the operator again with these values of symbols; returns None if that is not possible.
    """
    known = {text: _Condition(text, symbols) for text, symbols in graph.assumptions}
    other = {text: symbols for text, symbols in graph.assumptions if known[text].number < 0}
    cases = list(itertools.islice(_cases([each for each in known.values() if each.number >= 0]), _MOST))
    if other or len(cases) * len(graph.steps) > _MOST:
        return graph
    zeros = any(0 in values.values() for values in cases)
    unproven = list[Mapping[str, int]]()
    for values in sorted(cases, key=len):
        if any(each.items() <= values.items() for each in unproven):
            continue
        special = retrace(values)
        if special is None or not is_special_case(graph, special, values):
            unproven.append(values)
            other[_excluding(values)] = tuple(values)
            continue
        for text, symbols in special.assumptions:
            condition = _Condition(text, symbols)
            if condition.number < 0 or (condition.at_least and not zeros):
                other[text] = symbols
    return replace(graph, assumptions=tuple(other.items()))


class _Condition:
    """A condition that a product of sizes is not 1, or is at least 2; ``number`` is -1 if it has a different form."""

    def __init__(self, text: str, symbols: Sequence[str]) -> None:
        self.symbols = tuple(symbols)
        found = _RELATION.fullmatch(text)
        self.at_least = found is not None and found["ge"] is not None
        factors = (found["ge"] or found["ne"]).split("*") if found is not None else []
        numbers = [int(factor) for factor in factors if factor.isdigit()]
        self.number = math.prod(numbers) if found is not None and "" not in factors else -1

    def excludes(self, values: Mapping[str, int]) -> bool:
        """Whether the condition excludes these values of symbols, if all other symbols are at least 2."""
        known = [values[symbol] for symbol in self.symbols if symbol in values]
        if 0 in known:
            return self.at_least
        return len(known) == len(self.symbols) and self.number == 1


def _cases(conditions: Sequence[_Condition]) -> Iterator[dict[str, int]]:
    """Yield values (0 or 1) of symbols that the conditions exclude, if all other symbols are at least 2."""
    symbols = sorted({symbol for each in conditions for symbol in each.symbols})
    choices = (None, 0, 1) if any(each.at_least for each in conditions) else (None, 1)
    for chosen in itertools.product(choices, repeat=len(symbols)):
        case = {symbol: value for symbol, value in zip(symbols, chosen, strict=True) if value is not None}
        if any(each.excludes(case) for each in conditions):
            yield case


def _excluding(values: Mapping[str, int]) -> str:
    """Return a condition that excludes these values."""
    empty = next((symbol for symbol, value in values.items() if not value), "")
    return f"Ne({empty}, 0)" if empty else f"Ne({'*'.join(sorted(values))}, 1)"


@dataclass
class _Values:
    """Numbers the results of a graph's steps, so that results with equal numbers are equal.

    Attributes:
        graph: the graph.
        values: values of symbols.
        known: number of each description of a result, shared by the graphs that are compared.
    """

    graph: Graph
    values: Mapping[str, int]
    known: dict[Any, int]

    def __post_init__(self) -> None:
        self.shapes = [tuple(at_sizes(size, self.values) for size in step.shape) for step in self.graph.steps]
        self._made: list[int] = []
        self._undefined = 0

    def numbered(self) -> list[int]:
        """Return the number of each step's result; -1 for a result that cannot be compared."""
        ends = {number: ("operand", at) for at, number in enumerate(self.graph.inputs)}
        ends |= {number: ("cotangent", at) for at, number in enumerate(self.graph.cotangents) if number is not None}
        for number, step in enumerate(self.graph.steps):
            self._made.append(self._number(number, step, ends))
        return self._made

    def _number(self, number: int, step: Step, ends: Mapping[int, Any]) -> int:
        shape, operands = self._short(number), [self._made[each] for each in step.operands]
        known = not any(size.formula and not set(self.values).isdisjoint(size.symbols) for size in step.shape)
        if known and Size(0) in shape:
            return self._of(("empty", self.shapes[number], step.numbers))
        if not known or -1 in operands:
            return -1
        if isinstance(step.does, Primitive):
            return self._primitive(step, step.does, shape, operands)
        if isinstance(step.does, Reshape) and self._short(step.operands[0]) == shape:
            return operands[0]
        return self._of(self._source(number, step, shape, ends))

    def _source(self, number: int, step: Step, shape: Sequence[Size], ends: Mapping[int, Any]) -> Any:
        """Return the description of an operand, a constant or a reshape; for other steps, a unique description."""
        if isinstance(step.does, Input) and number in ends:
            return ends[number]
        if isinstance(step.does, Constant):
            defined = step.does.zero or bool(step.does.number)
            self._undefined += not defined
            return (step.does, shape, step.numbers, 0 if defined else self._undefined)
        if isinstance(step.does, Reshape):
            return ("reshape", self._made[step.operands[0]], shape)
        return ("unknown", id(self), number)

    def _primitive(self, step: Step, does: Primitive, shape: Sequence[Size], operands: Sequence[int]) -> int:
        given = [self.shapes[each] for each in step.operands]
        inputs = tuple(
            tuple(label for label, size in zip(labels, sizes, strict=True) if size != Size(1))
            for labels, sizes in zip(does.inputs, given, strict=True)
        )
        result = self.shapes[len(self._made)]
        output = tuple(label for label, size in zip(does.output, result, strict=True) if size != Size(1))
        if step.name in _PRODUCTS and len(operands) == 2:
            inputs, operands = zip(*sorted(zip(inputs, operands, strict=True), key=itemgetter(1)), strict=True)
        names = {
            label: at for at, label in enumerate(dict.fromkeys(each for part in (*inputs, output) for each in part))
        }
        sizes = [tuple(size for size in map(self._at, each) if size != Size(1)) for each in (does.times, does.per)]
        more = tuple(map(self._at, does.values))
        ones = step.name in {"mul", "div"} and does.numbers in {"[1]", "[1.0]"}
        numbers = "[]" if ones else does.numbers
        if (
            len(operands) == 1
            and inputs[0] == output
            and self._passes(step, does, (*sizes[0], *sizes[1], *more), numbers)
        ):
            return operands[0]
        short = replace(
            does,
            inputs=tuple(tuple(names[label] for label in labels) for labels in inputs),
            output=tuple(names[label] for label in output),
            copies=frozenset(names[label] for label in does.copies if label in names),
            whole=frozenset(names[label] for label in does.whole if label in names),
            times=sizes[0], per=sizes[1], values=more, numbers=numbers,
        )  # fmt: skip
        name = "move" if step.name in _MOVES else "product" if step.name in {"mm", "bmm"} else step.name
        if not (short.whole or more) and step.name in (*_MOVES, *_REDUCTIONS):
            short = replace(short, numbers="")
        return self._of((name, short, tuple(operands), tuple(shape), step.numbers))

    def _passes(self, step: Step, does: Primitive, sizes: Sequence[Size], numbers: str) -> bool:
        """Whether a step returns its only operand, given that both have the same dims apart from those of size 1."""
        if self.graph.steps[step.operands[0]].numbers != step.numbers or sizes:
            return False
        if step.name in {"mul", "div"}:
            return numbers == "[]" and bool(does.each)
        return step.name in _MOVES or step.name in _REDUCTIONS

    def _at(self, size: Size) -> Size:
        return at_sizes(size, self.values)

    def _short(self, number: int) -> tuple[Size, ...]:
        return tuple(size for size in self.shapes[number] if size != Size(1))

    def _of(self, description: Any) -> int:
        return self.known.setdefault(description, len(self.known))

"""Replaces symbols of sizes by names such as "dim 0 of operand 1", and states the sizes that a condition excludes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hyper_parallel.verify.frameworks.contract.primitives import Graph

__all__ = ["excluded_sizes", "in_words", "names_of_sizes"]

_FUNCTIONS = ((r"ToFloat\(([^()]*)\)", r"\1"), (r"FloatPow\(([^(),]*), ([^(),]*)\)", r"(\1) ** \2"),
              (r"FloatTrueDiv\(([^(),]*), ([^,]*)\)", r"\1 / \2"), (r"\bMod\(([^(),]*), ([^(),]*)\)", r"(\1) % (\2)"),
              (r"\bMax\(", "max("), (r"\bMin\(", "min("))  # fmt: skip
_NOT = {">=": "<", "<=": ">", ">": "<=", "<": ">="}
_SYMBOL = re.compile(r"\bs\d+\b")


def names_of_sizes(graph: Graph, operands: int) -> dict[str, str]:
    """Return a name of each symbol: the first dim of an operand that has this size, or a size among the arguments.

    Args:
        graph: an operator.
        operands: number of its operands; one more input of the graph has the sizes that are passed as arguments.
    """
    names: dict[str, str] = {}
    for at, number in enumerate(graph.inputs):
        for dim, size in enumerate(graph.steps[number].shape):
            if size.number == 1 and len(size.symbols) == 1 and not size.formula:
                text = f"dim {dim} of operand {at}" if at < operands else f"size {dim} of the arguments"
                names.setdefault(size.symbols[0], text)
    return names


def in_words(text: str, names: Mapping[str, str]) -> str:
    """Return a formula of sizes with the names of its symbols."""
    before = ""
    while before != text:
        before = text
        for pattern, words in _FUNCTIONS:
            text = re.sub(pattern, words, text)
    spaced = re.sub(r"(?<=\S)(\*\*|\*|//)(?=\S)", r" \1 ", text)
    return _SYMBOL.sub(lambda found: names.get(found[0], "another size"), re.sub(r"\(\(([^()]*)\)\)", r"(\1)", spaced))


def excluded_sizes(condition: str, names: Mapping[str, str]) -> str:
    """Return the sizes that a condition excludes, as text such as "dim 0 of operand 1 = 1"."""
    equation = re.fullmatch(r"(Ne|Eq)\((.*), ([^,()]*|[^,]*\(.*\))\)", condition)
    if equation is not None and not any(each in condition for each in "|&"):
        kind, left, right = equation.groups()
        if kind == "Ne" and right == "1" and re.fullmatch(r"s\d+(\*s\d+)*", left):
            return " and ".join(f"{names.get(each, 'another size')} = 1" for each in left.split("*"))
        return f"{in_words(left, names)} {'=' if kind == 'Ne' else '!='} {in_words(right, names)}"
    order = re.fullmatch(r"([^<>|&]*) (>=|<=|<|>) ([^<>|&]*)", condition)
    if order is not None:
        left, sign, right = order.groups()
        return f"{in_words(left, names)} {_NOT[sign]} {in_words(right, names)}"
    return f"those without: {in_words(condition, names)}"

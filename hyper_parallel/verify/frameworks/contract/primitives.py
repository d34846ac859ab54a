"""Graphs of primitives, which represent an operator in proofs.

A primitive is described by labels, one per dim of its operands and of its result. An element of the result depends on
the elements of the operands at the same labels, and on all elements along labels that are `whole` or `reduced`. The
only other facts are the operands in which it is linear or increasing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hyper_parallel.verify.frameworks.contract.sizes import Size

__all__ = ["Constant", "Graph", "Input", "Opaque", "Primitive", "Reshape", "Step", "kinds"]

Label = int
Labels = tuple[Label | None, ...]


@dataclass(frozen=True)
class Input:
    """An operand of the operator, or the gradient of one of its results."""


@dataclass(frozen=True)
class Constant:
    """A tensor with the same number in every element: zero, another number, or one that the program does not define.

    Attributes:
        zero: whether the number is zero.
        number: the number as text, empty if it is undefined.
    """

    zero: bool = False
    number: str = ""


@dataclass(frozen=True)
class Opaque:
    """A function without description."""

    reason: str


@dataclass(frozen=True)
class Reshape:
    """The elements of the operand in row-major order, in another shape."""


@dataclass(frozen=True)
class Primitive:
    """A function of labelled elements.

    Attributes:
        inputs: labels of the dims of each operand; None for a dim of one element that is broadcast.
        output: labels of the dims of the result.
        copies: labels of the result that no operand has, along which all elements are equal.
        whole: labels along which each element of the result depends on all elements.
        reduce: reduction of the labels that the result lacks, or empty if they are ``whole`` too.
        each: operands in which it is linear separately, with the others fixed.
        joint: operands in which it is linear jointly.
        increasing: whether each element of the result is an increasing function of one element of the operands.
        strict: whether it is increasing, and its derivative is zero wherever two values have the same result.
        moves: whether each element of the result is an element of an operand or zero, for all values. If there are
            operands ``each``, the elements are theirs, and the other operands determine the positions.
        times: sizes that are factors of the result.
        per: sizes that divide the result.
        values: other sizes that the result depends on.
        numbers: numbers that the result depends on, as text.
    """

    inputs: tuple[Labels, ...]
    output: Labels
    copies: frozenset[Label] = frozenset()
    whole: frozenset[Label] = frozenset()
    reduce: str = ""
    each: tuple[int, ...] = ()
    joint: tuple[int, ...] = ()
    increasing: bool = False
    strict: bool = False
    moves: bool = False
    times: tuple[Size, ...] = ()
    per: tuple[Size, ...] = ()
    values: tuple[Size, ...] = ()
    numbers: str = ""


@dataclass(frozen=True)
class Step:
    """One primitive in a graph.

    Attributes:
        name: name of the framework's function.
        does: description of the function.
        operands: numbers of the steps whose results are its operands.
        shape: shape of its result.
        numbers: what its result consists of, as NumPy's letter: ``f``, ``c``, ``i`` or ``b``; empty if it is not known.
    """

    name: str
    does: Input | Constant | Opaque | Reshape | Primitive
    operands: tuple[int, ...]
    shape: tuple[Size, ...]
    numbers: str = ""


@dataclass(frozen=True)
class Graph:
    """An operator and its backward as primitives over symbolic sizes.

    Attributes:
        steps: the steps in order of execution.
        inputs: the step of each operand; then a step whose dims are the sizes among the arguments, replicated on every
            rank.
        outputs: the step of each result.
        cotangents: the step of the gradient of each result; None for a result without gradient.
        gradients: the step of the gradient of each operand; None for an operand without gradient. Empty without
            backward.
        hints: one value of each symbol.
        result_sizes: the sizes of each result for these values.
        assumptions: conditions on symbols under which the graph is the operator, each with its symbols.
        no_backward: the reason why there is no backward, or empty.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cotangents: tuple[int | None, ...] = ()
    gradients: tuple[int | None, ...] = ()
    hints: dict[str, int] = field(default_factory=dict, hash=False)
    result_sizes: tuple[tuple[int, ...], ...] = ()
    assumptions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    no_backward: str = ""


def kinds(graph: Graph) -> frozenset[object]:
    """Return the kinds of steps of a graph; equal steps, and equal operands of a step, count once.

    So an operator with one result per element of a dim has the same kinds for every length of the dim.
    """
    of_steps: list[object] = []
    for step in graph.steps:
        does: object = step.does
        if isinstance(step.does, Primitive):
            inputs, groups = step.does.inputs, (step.does.each, step.does.joint)
            classes = [frozenset(inputs[index] for index in group) for group in groups]
            does = (frozenset(inputs), *classes, replace(step.does, inputs=(), each=(), joint=(), numbers=""))
        operands = frozenset(of_steps[operand] for operand in step.operands)
        symbols = tuple(size.symbols for size in step.shape)
        of_steps.append((step.name.rstrip("_0123456789"), does, operands, symbols, len(step.operands) > 1))
    ends = (graph.inputs, graph.outputs, graph.cotangents, graph.gradients)
    of_ends = tuple(frozenset(None if number is None else of_steps[number] for number in each) for each in ends)
    return frozenset([*of_steps, of_ends, graph.no_backward])

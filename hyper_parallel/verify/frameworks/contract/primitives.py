"""Graphs of primitives, which represent an operator in proofs.

A primitive is a function of tensors, described as in einsum by a label for each dim of its operands and of its result.
An element of the result depends on the elements of the operands at the same labels, and on all elements along labels
that are ``whole`` or that the result lacks (``reduce``). The description also says in which operands the function is
linear or increasing.
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
    """A tensor with the same number in every element; the number may be undefined, as for random numbers.

    Attributes:
        zero: whether the number is zero.
        number: the number as text, empty if it is undefined.
    """

    zero: bool = False
    number: str = ""


@dataclass(frozen=True)
class Opaque:
    """A function that no table describes; a proof cannot pass it."""

    reason: str


@dataclass(frozen=True)
class Reshape:
    """A reshape: the elements of the operand in row-major order, in a new shape."""


@dataclass(frozen=True)
class Primitive:
    """The description of a function of tensors by labels.

    Attributes:
        inputs: labels of the dims of each operand; None for a dim of one element that is broadcast.
        output: labels of the dims of the result.
        copies: labels of the result that no operand has, along which all elements are equal.
        whole: labels along which each element of the result depends on all elements of the operands.
        reduce: reduction over the labels that the result lacks, such as ``sum``; empty if these labels are ``whole``.
        each: operands in each of which the function is linear while the others are fixed, as in a product.
        joint: operands in which the function is linear jointly, as in a sum.
        increasing: whether each element of the result is an increasing function of one element of the operands.
        strict: whether the function is increasing, with derivative zero wherever different inputs have equal results.
        moves: whether each element of the result is an element of an operand or zero, for all values. If there are
            operands ``each``, the elements come from these, and the other operands determine the positions.
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
        numbers: kind of the result's dtype as NumPy's letter: ``f``, ``c``, ``i`` or ``b``; empty if not known.
    """

    name: str
    does: Input | Constant | Opaque | Reshape | Primitive
    operands: tuple[int, ...]
    shape: tuple[Size, ...]
    numbers: str = ""


@dataclass(frozen=True)
class Graph:
    """An operator and its backward as a graph of primitives over symbolic sizes.

    Attributes:
        steps: the steps in order of execution.
        inputs: the step of each operand. An additional replicated operand may follow, whose dims are the sizes that are
            passed as arguments.
        outputs: the step of each result.
        cotangents: the step of the gradient of each result; None for a result without gradient.
        gradients: the step of the gradient of each operand; None for an operand without gradient. Empty without
            backward.
        hints: one example value of each symbol.
        result_sizes: the sizes of each result for these example values.
        assumptions: conditions under which the graph is valid, each with the symbols that occur in it.
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
    """Return the set of different steps of a graph; steps are equal if functions, shapes and operands are.

    Therefore an operator with one result per element of a dim, such as unbind, has the same kinds for every size of
    the dim.
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

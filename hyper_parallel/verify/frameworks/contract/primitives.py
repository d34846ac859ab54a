"""An operator as primitives: what a proof is about.

A primitive is described by labels, one per dim of its operands and of its result. The element of the result at some
labels depends on the elements of the operands at these labels, and on all that differ in the labels which are `whole`
or `reduced`. Nothing else is known of it, except where it is linear and where it is increasing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hyper_parallel.verify.frameworks.contract.sizes import Size

__all__ = ["Constant", "Graph", "Input", "Opaque", "Primitive", "Reshape", "Step"]

Label = int
Labels = tuple[Label | None, ...]


@dataclass(frozen=True)
class Input:
    """An operand of the operator, or the gradient of one of its results."""


@dataclass(frozen=True)
class Constant:
    """The same number in every element: zero, another one, or one that the program does not define.

    Attributes:
        zero: whether it is zero.
        number: it as text, empty where it is not defined.
    """

    zero: bool = False
    number: str = ""


@dataclass(frozen=True)
class Opaque:
    """What has no description."""

    reason: str


@dataclass(frozen=True)
class Reshape:
    """The elements of the operand in row-major order, in other sizes."""


@dataclass(frozen=True)
class Primitive:
    """A function of labelled elements.

    Attributes:
        inputs: a label per dim of each operand; None for a dim of one element that is stretched.
        output: a label per dim of the result.
        copies: labels of the result that no operand has, along which all elements are equal.
        whole: labels along which elements of the result depend on all elements.
        reduce: how labels that the result lacks are reduced, or empty where they are whole as well.
        each: operands in each of which it is linear while the others are fixed.
        joint: operands in which it is linear together.
        increasing: each element of the result depends on one element of the operands, and increases with it.
        moves: each element of the result is an element of an operand, or zero, whatever the values are; of the operands
            ``each`` if there are some, at places that the others give.
        times: sizes that are factors of the result; ``per`` are divisors.
        per: sizes that divide the result.
        values: other sizes that the result depends on.
        numbers: that the result depends on, as text.
    """

    inputs: tuple[Labels, ...]
    output: Labels
    copies: frozenset[Label] = frozenset()
    whole: frozenset[Label] = frozenset()
    reduce: str = ""
    each: tuple[int, ...] = ()
    joint: tuple[int, ...] = ()
    increasing: bool = False
    moves: bool = False
    times: tuple[Size, ...] = ()
    per: tuple[Size, ...] = ()
    values: tuple[Size, ...] = ()
    numbers: str = ""


@dataclass(frozen=True)
class Step:
    """One primitive in a graph.

    Attributes:
        name: of the framework's function.
        does: what it does.
        operands: numbers of the steps that it takes its operands from.
        shape: sizes of its result.
    """

    name: str
    does: Input | Constant | Opaque | Reshape | Primitive
    operands: tuple[int, ...]
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Graph:
    """An operator and its backward as primitives over symbolic sizes.

    Attributes:
        steps: in the order in which they run.
        inputs: the step of each operand; then one whose dims are the sizes that are arguments, whole on every rank.
        outputs: the step of each result.
        cotangents: per result the step of its gradient, None where it has none.
        gradients: per operand the step of its gradient, None where it has none; empty where the backward is not there.
        hints: a value of each symbol.
        assumptions: conditions on symbols under which this is the operator, with the symbols of each.
        no_backward: why the backward is not there, or empty.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cotangents: tuple[int | None, ...] = ()
    gradients: tuple[int | None, ...] = ()
    hints: dict[str, int] = field(default_factory=dict, hash=False)
    assumptions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    no_backward: str = ""

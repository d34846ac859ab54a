"""Checks one row of a rule: whether the laws derive the placements of the results from those of the operands.

The row is plain data; the code that made the row is not called. In forward, each result must have the placement that
the row states. In backward, the gradients of the results are given in the dual placements, and the gradient of each
operand must have the operand's dual placement: replicated for a pending sum, a shard for a shard. If a replicated
operand is used with operands that differ between ranks, its gradient must be a pending sum, which the library reduces
(varying view). "Pending" is the laws' word for partial.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.verify.checker.shards import NUMBERS
from hyper_parallel.verify.frameworks.contract.primitives import Graph, Input, Primitive, Reshape
from hyper_parallel.verify.frameworks.contract.sizes import ONE, Size
from hyper_parallel.verify.prove.laws import Relation, UnprovenError, after
from hyper_parallel.verify.prove.size_words import excluded_sizes, in_words, names_of_sizes

if TYPE_CHECKING:
    from hyper_parallel.core.shard.rule import Row

__all__ = ["Proof", "prove_row"]


@dataclass(frozen=True)
class Proof:
    """The result of applying the laws to one row.

    Attributes:
        forward: the reason why the results are not proven, or empty.
        backward: the reason why the gradients are not proven, or empty.
        conditions: conditions on sizes that the proof needs; the row requires them too.
        sizes: local sizes that the decomposition does not cover, as text.
        differentiable: whether the operator has gradients.
    """

    forward: str = ""
    backward: str = ""
    conditions: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    differentiable: bool = True

    @property
    def holds(self) -> bool:
        """Whether the row is proven, forward and backward."""
        return not self.forward and not self.backward


_NOT_GIVEN = "a gradient that is not given"


@dataclass
class _Walk:
    """Applies the laws to a graph, step by step, to derive the relation of each result."""

    graph: Graph
    split: str
    needs: set[tuple[str, Size]] = field(default_factory=set)
    known: dict[int, Relation] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)

    def run(self, given: Mapping[int, Relation]) -> None:
        """Apply the laws to every step whose operands have known relations."""
        for number, step in enumerate(self.graph.steps):
            if number in given:
                self.known[number] = given[number]
                continue
            missing = [operand for operand in step.operands if operand in self.unknown]
            if missing:
                self.unknown[number] = self.unknown[missing[0]]
                continue
            if isinstance(step.does, Input):
                self.unknown[number] = _NOT_GIVEN
                continue
            operands = [self.known[operand] for operand in step.operands]
            shapes = [self.graph.steps[operand].shape for operand in step.operands]
            try:
                self.known[number] = after(step, shapes, operands, self.split, self.needs)
            except UnprovenError as error:
                self.unknown[number] = str(error)

    def problem(self, number: int, wanted: Relation) -> str:
        """Return the reason why the result of step ``number`` does not have the relation ``wanted``, or ""."""
        if number in self.unknown:
            return self.unknown[number]
        found, size = self.known[number], self.graph.steps[number].shape
        if found.zero:
            local = [dim for dim, each in enumerate(size) if self.split and self.split in each.symbols]
            split = local == ([wanted.dim] if wanted.kind == "part" else [])
            return "" if split else f"it is zero with local sizes in dims {local}, not {_words(wanted)}"
        if (found.kind, found.dim, found.reduce, found.ranks, found.share) != (
            wanted.kind, wanted.dim, wanted.reduce, wanted.ranks, wanted.share,
        ):  # fmt: skip
            return f"it is {_words(found)}, not {_words(wanted)}"
        if found.outer != ONE:
            return f"of dim {found.dim} ranks have rows of each of {found.outer} blocks"
        if found.kind == "part":
            self.needs.update(_even(size[found.dim], self.split))
        return ""


def prove_row(graph: Graph, row: Row) -> Proof:
    """Return the result of applying the laws to ``row``.

    Args:
        graph: the operator and its backward.
        row: placements of the operands and results, and conditions.
    """
    proofs = [_prove(graph, row, split) for split in _candidates(graph, row)]
    best = next((proof for proof in proofs if proof.holds), None)
    return best or next((proof for proof in proofs if not proof.forward), proofs[0])


def _candidates(graph: Graph, row: Row) -> list[str]:
    """Return the symbols of the labels that the row may split; ``[""]`` if the row splits none."""
    found = [graph.steps[number].shape[place.dim].symbols
             for number, place in zip(graph.inputs, row.inputs, strict=False) if isinstance(place, Shard)]  # fmt: skip
    return list(dict.fromkeys(found[0])) if found and found[0] else [""]


def _prove(graph: Graph, row: Row, split: str) -> Proof:
    walk, differs = _Walk(graph, split), any(not place.is_replicate() for place in row.inputs)
    given: dict[int, Relation] = {}
    differentiable = any(number is not None for number in graph.gradients)
    try:
        for at, number in enumerate(graph.inputs):
            given[number] = _given(walk, number, row.inputs[at] if at < len(row.inputs) else Replicate())
        duals = [
            None if number is None else _dual(walk, number, place)
            for number, place in zip(graph.cotangents or [None] * len(row.outputs), row.outputs, strict=True)
        ]
    except UnprovenError as error:
        return Proof(forward=str(error))
    given |= {number: dual for number, dual in zip(graph.cotangents, duals, strict=False)
              if number is not None and dual is not None}  # fmt: skip
    walk.run(given)
    forward = ""
    exists = not any(map(partial(_is_impossible, graph), graph.inputs, row.inputs))
    for number, place in zip(graph.outputs, row.outputs, strict=True):
        forward = forward or _mismatch(walk, number, place)
        if exists and isinstance(place, Partial) and _is_impossible(graph, number, place):
            forward = forward or f"of a result of {_NAMES[graph.steps[number].numbers]} no {place.reduce_op} is taken"
    forward = forward or _missing(walk, row)
    backward = graph.no_backward
    extremum = any(number is not None and dual is None for number, dual in zip(graph.cotangents, duals, strict=False))
    attained = extremum and _keeps_extrema(graph)
    for wanted, place in zip(graph.gradients, row.inputs, strict=False):
        if wanted is not None and not backward and not attained:
            backward = walk.problem(wanted, _gradient(place, differs=differs))
    if backward == _NOT_GIVEN:
        backward = "the gradient of an extremum goes to the ranks that attain it"
    backward = backward or (_missing(walk, row) if not forward else "")
    names = names_of_sizes(graph, len(row.inputs))
    excluded = {text: excluded_sizes(text, names) for text, _ in graph.assumptions}
    forward = forward or next((f"another algorithm is used where {words}" for text, words in excluded.items()
                               if (found := _BOUND.fullmatch(text)) and int(found[1]) < _LIMIT), "")  # fmt: skip
    conditions = tuple(sorted(f"{_CONDITIONS[kind]} {in_words(str(size), names)}" for kind, size in walk.needs))
    sizes = tuple(dict.fromkeys(excluded.values()))
    return Proof(forward, backward, conditions, sizes, differentiable or bool(graph.no_backward))


_NONE = -99
_NAMES = {"f": "floating numbers", "c": "complex numbers", "i": "integers", "b": "booleans"}
_BOUND, _LIMIT = re.compile(r"s\d+ <=? (\d+)"), 2**20
"""Matches an assumption that a size is below a limit: PyTorch chooses a different algorithm for larger sizes."""
_CONDITIONS = {"even": "the number of ranks divides", "full": "no rank has an empty part of"}


def _is_impossible(graph: Graph, number: int, place: Placement) -> bool:
    """Whether ``place`` does not exist for the dtype of a step's result, such as a partial sum of booleans."""
    return isinstance(place, Partial) and graph.steps[number].numbers not in NUMBERS[place.reduce_op]


def _keeps_extrema(graph: Graph) -> bool:
    """Whether every element of a result is an element of an operand, or a ``strict`` function of one, such as relu.

    Backward sends the gradient of a pending maximum to the ranks whose result attains it. These ranks then also attain
    the maximum of the operand, or the derivative is zero there.
    """
    waiting, seen = list(graph.outputs), set[int]()
    while waiting:
        number = waiting.pop()
        step = graph.steps[number]
        keeps = isinstance(step.does, Primitive) and (step.does.moves or step.does.strict)
        if not keeps and not isinstance(step.does, (Input, Reshape)):
            return False
        seen.add(number)
        waiting.extend(operand for operand in step.operands if operand not in seen)
    return True


def _given(walk: _Walk, number: int, place: Placement) -> Relation:
    shape = walk.graph.steps[number].shape
    split_dim = place.dim if isinstance(place, Shard) else -1
    for dim, size in enumerate(shape):
        if walk.split and (walk.split in size.symbols) != (dim == split_dim):
            msg = f"operand {walk.graph.inputs.index(number)}: dim {dim} of size {size} must be split as well"
            raise UnprovenError(msg)
    if isinstance(place, Shard):
        factor = shape[place.dim].over(Size(1, (walk.split,))) if walk.split else None
        if factor is None:
            msg = f"a dim of size {shape[place.dim]} is split"
            raise UnprovenError(msg)
        walk.needs.update(_even(shape[place.dim], walk.split))
        return Relation("part", place.dim, ONE, factor)
    return _result(place)


def _result(place: Placement) -> Relation:
    """Return the relation that a placement denotes; a partial average is a pending sum of values scaled by ``n``."""
    if isinstance(place, Shard):
        return Relation("part", place.dim)
    if isinstance(place, Partial):
        return Relation("pending", reduce="sum", ranks=1) if place.reduce_op == "avg" else Relation(
            "pending", reduce=place.reduce_op
        )  # fmt: skip
    return Relation("whole")


def _mismatch(walk: _Walk, number: int, place: Placement) -> str:
    """Return why a result does not have ``place``, or ""; a replicated result also counts as its average or maximum."""
    own = isinstance(place, Partial) and place.reduce_op in {"avg", "max", "min", "any", "all"}
    return walk.problem(number, Relation("whole") if own else _result(place)) and walk.problem(number, _result(place))


def _dual(walk: _Walk, number: int, place: Placement) -> Relation | None:
    """Return the relation of the gradient of a result in ``place``; None if it depends on values, as for a maximum."""
    if isinstance(place, Partial):
        return {"sum": Relation("whole"), "avg": Relation("whole", ranks=-1)}.get(place.reduce_op)
    if isinstance(place, Shard):
        size = walk.graph.steps[number].shape[place.dim]
        factor = size.over(Size(1, (walk.split,))) if walk.split else None
        if factor is None:
            msg = f"a result of size {size} is split"
            raise UnprovenError(msg)
        return Relation("part", place.dim, ONE, factor)
    return Relation("whole")


def _gradient(place: Placement, *, differs: bool) -> Relation:
    """Return the required relation of the gradient of an operand in ``place``.

    For a pending maximum or minimum, only a gradient of zero is accepted.
    """
    if isinstance(place, Partial) and place.reduce_op not in {"sum", "avg"}:
        return Relation("whole", ranks=_NONE)
    if isinstance(place, Shard):
        return Relation("part", place.dim)
    if isinstance(place, Partial):
        return Relation("whole", ranks=-1 if place.reduce_op == "avg" else 0)
    return Relation("pending", reduce="sum") if differs else Relation("whole")


def _even(size: Size, split: str) -> set[tuple[str, Size]]:
    """Return the condition under which a rank's elements of the split label are its shard of a dim of ``size``.

    The condition is empty if the dim is the label itself, else equal shards of the label.
    """
    label = Size(1, (split,))
    return set() if size.over(label) == ONE else {("even", label)}


def _missing(walk: _Walk, row: Row) -> str:
    """Return a condition that the proof needs but the row does not require, or an empty text."""
    hints = walk.graph.hints

    def sizes(pairs: Sequence[tuple[int, int]]) -> set[int]:
        return {walk.graph.steps[walk.graph.inputs[index]].shape[dim].value(hints) for index, dim in pairs}

    asked = {
        "even": sizes(row.even) | {other for *_, other in row.sizes},
        "full": sizes(row.full),
    }
    for kind, size in sorted(walk.needs, key=str):
        if size.value(hints) not in asked[kind]:
            words = in_words(str(size), names_of_sizes(walk.graph, len(row.inputs)))
            return f"the row does not ask that {_CONDITIONS[kind]} {words}"
    return ""


def _words(relation: Relation) -> str:
    text = {"whole": "whole", "part": f"split along dim {relation.dim}", "pending": f"a pending {relation.reduce}"}
    factors = [f"n^{relation.ranks}"] * bool(relation.ranks) + [f"(local/global size)^{relation.share}"] * bool(
        relation.share
    )
    return text[relation.kind] + "".join(f" times {factor}" for factor in factors)

"""Labelled dims: an einsum-like description of an operator, turned into rows.

``labels(inputs=[("b", "k"), ("n", "k")], outputs=[("b", "n")])`` says which dims of which operands run together. A
label in an input and an output may be sharded in both; a label missing from the output is reduced, if the operator
reduces by addition; a label in ``whole`` may not be sharded. A dim labelled None (broadcast, size 1) stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.rule import OpCall, Operand, R, Row, Strategies, replicated_row

__all__ = [
    "Labels",
    "broadcast_labels",
    "labelled_rows",
    "nonempty",
    "nonempty_row",
    "nonempty_rows",
    "pattern",
    "patterned",
]

Label = Hashable
LINEAR_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Labels:
    """Which dims run together, and what happens to summands.

    Attributes:
        inputs: per operand, a label per dim.
        outputs: per output, a label per dim.
        reduce: reduction that a label absent from the outputs leaves pending (``sum``), or None to keep it whole.
        whole: labels that may not be sharded.
        each: operands in each of which the operator is linear while the others are fixed.
        joint: operands in which it is linear together; on an axis where summands are pending they are all Partial.
        joins: operands added once to a pending sum (a bias): Partial wherever the output is.
        monotone: Partial reductions (``max``, ``min``) that pass through an increasing operator of one operand.
    """

    inputs: tuple[tuple[Label | None, ...], ...]
    outputs: tuple[tuple[Label | None, ...], ...]
    reduce: str | None = "sum"
    whole: frozenset[Label] = frozenset()
    each: tuple[int, ...] = ()
    joint: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()
    monotone: tuple[str, ...] = ()


def labelled_rows(labels: Labels) -> tuple[Row, ...]:
    """All rows that the labels imply, the replicated one first."""
    rows = [replicated_row(len(labels.inputs), len(labels.outputs))]
    rows.extend(_shard_rows(labels))
    rows.extend(_partial_rows(labels))
    return tuple(rows)


def nonempty_rows(labels: Labels) -> tuple[Row, ...]:
    """As :func:`labelled_rows`, for local calls that do not work on nothing."""
    return tuple(map(nonempty_row, labelled_rows(labels)))


def nonempty_row(row: Row) -> Row:
    """The same where no rank's piece is empty.

    An empty call may fail, or record no backward, for whose collectives the other ranks would wait.
    """
    cut = tuple((index, place.dim) for index, place in enumerate(row.inputs) if isinstance(place, Shard))
    return replace(row, full=cut)


def _shard_rows(labels: Labels) -> Iterator[Row]:
    for label in _ordered(labels.inputs):
        if label in labels.whole:
            continue
        inputs = [_placed(dims, label) for dims in labels.inputs]
        outputs = [_placed(dims, label) for dims in labels.outputs]
        absent = [place == R for place in outputs]
        if any(absent):
            if labels.reduce is None:
                continue
            outputs = [Partial(labels.reduce) if gone else place for place, gone in zip(outputs, absent, strict=True)]
            for joined in labels.joins:
                inputs[joined] = Partial(labels.reduce)
        yield Row(tuple(inputs), tuple(outputs))


def _partial_rows(labels: Labels) -> Iterator[Row]:
    count = len(labels.inputs)
    sets = [(one, *labels.joins) for one in labels.each]
    if labels.joint:
        sets.append((*labels.joint, *labels.joins))
    for pending in dict.fromkeys(tuple(sorted(set(one))) for one in sets):
        for op in LINEAR_OPS:
            held: list[Placement] = [Partial(op) if index in pending else R for index in range(count)]
            yield Row(tuple(held), (Partial(op),) * len(labels.outputs))
    for op in labels.monotone:
        yield Row((Partial(op),) * count, (Partial(op),) * len(labels.outputs))


def _ordered(inputs: Iterable[tuple[Label | None, ...]]) -> list[Label]:
    return list(dict.fromkeys(label for dims in inputs for label in dims if label is not None))


def _placed(dims: tuple[Label | None, ...], label: Label) -> Placement:
    return Shard(dims.index(label)) if label in dims else R


def broadcast_labels(
    shapes: Sequence[Sequence[int]], prefix: str = "d"
) -> tuple[tuple[tuple[str | None, ...], ...], tuple[str | None, ...], tuple[int, ...]]:
    """Labels of operands that broadcast against each other.

    Returns:
        labels per operand (None where it is stretched), labels of the output, shape of the output.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    ndim = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    out = tuple(_stretched([shape[dim] for shape in padded], shapes) for dim in range(ndim))
    labels = tuple(
        tuple(f"{prefix}{dim}" if padded[index][dim] == out[dim] else None for dim in range(ndim - len(shape), ndim))
        for index, shape in enumerate(shapes)
    )
    return labels, tuple(f"{prefix}{dim}" for dim in range(ndim)), out


def _stretched(sizes: list[int], shapes: Sequence[Sequence[int]]) -> int:
    wanted = {size for size in sizes if size != 1}
    if len(wanted) > 1:
        msg = f"shapes {' and '.join(str(list(shape)) for shape in shapes)} do not broadcast"
        raise ValueError(msg)
    return wanted.pop() if wanted else 1


# -- signatures as text -----------------------------------------------------------------------------------------------

Names = tuple[str | None, ...]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Term:
    """One operand or output: whether it has leading dims, and its named dims with whether each must be whole."""

    batch: bool
    dims: tuple[tuple[str, bool], ...]


@cache
def _parse(text: str) -> tuple[dict[str, Term], tuple[Term, ...]]:
    left, _, right = text.partition("->")
    operands = dict(one.split(maxsplit=1) for one in left.split(","))
    outputs = [one.strip() for one in right.split(",")]
    return {name: _term(dims) for name, dims in operands.items()}, tuple(map(_term, outputs))


def _term(text: str) -> Term:
    found = re.findall(r"\[(\w+)\]|(\w)", text.replace("...", ""))
    return Term(text.startswith("..."), tuple((whole or free, bool(whole)) for whole, free in found))


def pattern(
    call: OpCall,
    text: str,
    sizes: Mapping[str, int | Callable[[Sizes], int]] | None = None,
    *,
    each: Sequence[str] = (),
    full: bool = False,
) -> Strategies:
    """Rows and shapes that ``text`` implies for ``call``.

    Args:
        call: the call.
        text: the signature.
        sizes: sizes of dims that only outputs have, as numbers or computed from the sizes of the operands' dims.
        each: names of operands in each of which the operator is linear while the others are fixed.
        full: True where the local call does not take empty pieces.

    Raises:
        ValueError: an operand does not fit.
    """
    operands, outputs = _parse(text)
    terms = [operands[operand.name] for operand in call.operands]
    known: Sizes = {}
    batches = [_bind(operand, term, known) for operand, term in zip(call.operands, terms, strict=True)]
    leading, common, batch = broadcast_labels(batches, "...")
    for name, size in (sizes or {}).items():
        known[name] = size if isinstance(size, int) else size(known)
    inputs = [(*lead, *(name for name, _ in term.dims)) for lead, term in zip(leading, terms, strict=True)]
    outs = [(*(common if term.batch else ()), *(name for name, _ in term.dims)) for term in outputs]
    shapes = tuple((*(batch if term.batch else ()), *(known[name] for name, _ in term.dims)) for term in outputs)
    whole = {name for term in (*terms, *outputs) for name, held in term.dims if held}
    rows = [replicated_row(len(inputs), len(outs))]
    for label in dict.fromkeys(name for names in inputs for name in names if name is not None and name not in whole):
        rows.extend(_pattern_rows(label, inputs, outs, shapes))
    linear = [index for index, operand in enumerate(call.operands) if operand.name in each]
    rows.extend(_pending_row(index, op, len(inputs), len(outs)) for index in linear for op in LINEAR_OPS)
    return Strategies(nonempty(rows) if full else tuple(rows), shapes, many=len(outs) > 1)


def _bind(operand: Operand, term: Term, known: Sizes) -> tuple[int, ...]:
    """Record the sizes of the named dims of ``operand``; its leading dims."""
    at = operand.ndim - len(term.dims)
    if at < 0 or (at and not term.batch):
        msg = f"{operand.name} has {operand.ndim} dims, it needs {'at least ' * term.batch}{len(term.dims)}"
        raise ValueError(msg)
    for (name, _), size in zip(term.dims, operand.shape[at:], strict=True):
        if known.setdefault(name, size) != size:
            msg = f"{operand.name} {list(operand.shape)} does not fit: dim {name} is {known[name]} elsewhere"
            raise ValueError(msg)
    return operand.shape[:at]


def _pattern_rows(
    label: str, inputs: Sequence[Names], outs: Sequence[Names], shapes: Sequence[tuple[int, ...]]
) -> Iterator[Row]:
    """``label`` sharded wherever it stands; an output without it must be empty, which is the same on every rank."""
    if all(label in names or 0 in shape for names, shape in zip(outs, shapes, strict=True)):
        yield Row(tuple(_placed(names, label) for names in inputs), tuple(_placed(names, label) for names in outs))


def _pending_row(index: int, op: str, inputs: int, outputs: int) -> Row:
    held: list[Placement] = [R] * inputs
    held[index] = Partial(op)
    return Row(tuple(held), (Partial(op),) * outputs)


def patterned(
    text: str, *, each: Sequence[str] = (), full: bool = False, **sizes: int | Callable[[Sizes], int]
) -> Callable[[OpCall], Strategies]:
    """The placement function of an operator that ``text`` describes in every call."""
    return lambda call: pattern(call, text, sizes, each=each, full=full)


def nonempty(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The same rows where no rank holds an empty piece, for local calls that refuse those or are no graph of them."""
    return tuple(
        replace(row, full=tuple((at, place.dim) for at, place in enumerate(row.inputs) if isinstance(place, Shard)))
        for row in rows
    )

"""Turns einsum-like descriptions of operators ("labels") into rows.

``Labels(inputs=(("b", "k"), ("n", "k")), outputs=(("b", "n"),))`` gives every dim of every operand a label. A label in
an input and an output may be sharded in both. A label missing from the output is reduced; it may be sharded if the
reduction is an addition. A label in ``whole`` may not be sharded, nor a dim labelled None (broadcast, of size 1).

A pattern is the same as text: ``"x ...[m][n], tau ...[k] -> ...[m][n]"``. ``...`` means leading dims that broadcast
against each other and pass through; dims in brackets may not be sharded. Each operand starts with its name; operands
that are not passed are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hyper_parallel._caches import register
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
    "pattern_rule",
]

Label = Hashable
LINEAR_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Labels:
    """The correspondence of dims of operands and outputs, and the partial values that pass through.

    Attributes:
        inputs: per operand, a label per dim.
        outputs: per output, a label per dim.
        reduce: the reduction (``sum``) that stays partial if a label absent from the outputs is sharded; None if such
            a label may not be sharded.
        whole: labels that may not be sharded.
        each: operands in each of which the operator is linear while the others are fixed.
        joint: operands in which the operator is linear together: on one axis, all of them are Partial or none is.
        joins: operands that are added to the result once, such as a bias; each is Partial wherever the output is.
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
    """All rows that ``labels`` imply, the replicated one first."""
    rows = [replicated_row(len(labels.inputs), len(labels.outputs))]
    rows.extend(_shard_rows(labels))
    rows.extend(_partial_rows(labels))
    return tuple(rows)


def nonempty_rows(labels: Labels) -> tuple[Row, ...]:
    """The rows of :func:`labelled_rows`, for local calls that do not accept empty shards."""
    return nonempty(labelled_rows(labels))


def nonempty_row(row: Row) -> Row:
    """Return ``row``, restricted to sizes for which no rank has an empty shard.

    A local call on an empty shard may fail, or record no backward, so that other ranks wait for its collectives.
    """
    sharded = ((index, place.dim) for index, place in enumerate(row.inputs) if isinstance(place, Shard))
    return replace(row, full=tuple(sharded))


def nonempty(rows: Iterable[Row]) -> tuple[Row, ...]:
    """``rows``, each restricted as by :func:`nonempty_row`."""
    return tuple(map(nonempty_row, rows))


def _shard_rows(labels: Labels) -> Iterator[Row]:
    for label in _ordered(labels.inputs):
        if label in labels.whole:
            continue
        inputs = [_placement(dims, label) for dims in labels.inputs]
        outputs = [_placement(dims, label) for dims in labels.outputs]
        if R in outputs:
            if labels.reduce is None:
                continue
            partial = Partial(labels.reduce)
            outputs = [partial if placement == R else placement for placement in outputs]
            for index in labels.joins:
                inputs[index] = partial
        yield Row(tuple(inputs), tuple(outputs))


def _partial_rows(labels: Labels) -> Iterator[Row]:
    count = len(labels.inputs)
    together = [(index, *labels.joins) for index in labels.each]
    if labels.joint:
        together.append((*labels.joint, *labels.joins))
    for partial in dict.fromkeys(tuple(sorted(set(operands))) for operands in together):
        for op in LINEAR_OPS:
            yield _partial_row(partial, op, count, len(labels.outputs))
    for op in labels.monotone:
        yield Row((Partial(op),) * count, (Partial(op),) * len(labels.outputs))


def _partial_row(partial: Collection[int], op: str, inputs: int, outputs: int) -> Row:
    placements: list[Placement] = [Partial(op) if index in partial else R for index in range(inputs)]
    return Row(tuple(placements), (Partial(op),) * outputs)


def _ordered(inputs: Iterable[tuple[Label | None, ...]]) -> list[Label]:
    return list(dict.fromkeys(label for dims in inputs for label in dims if label is not None))


def _placement(dims: tuple[Label | None, ...], label: Label) -> Placement:
    return Shard(dims.index(label)) if label in dims else R


def broadcast_labels(
    shapes: Sequence[Sequence[int]], prefix: str = "d"
) -> tuple[tuple[tuple[str | None, ...], ...], tuple[str | None, ...], tuple[int, ...]]:
    """Labels of operands that broadcast against each other.

    Args:
        shapes: the shape of each operand.
        prefix: prefix of the labels; each ends with the index of the output's dim.

    Returns:
        labels per operand (None for a dim that is stretched), labels of the output, and its shape.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    ndim = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    out = tuple(_broadcast_size([shape[dim] for shape in padded], shapes) for dim in range(ndim))
    labels = tuple(
        tuple(f"{prefix}{dim}" if padded[index][dim] == out[dim] else None for dim in range(ndim - len(shape), ndim))
        for index, shape in enumerate(shapes)
    )
    return labels, tuple(f"{prefix}{dim}" for dim in range(ndim)), out


def _broadcast_size(sizes: list[int], shapes: Sequence[Sequence[int]]) -> int:
    distinct = {size for size in sizes if size != 1}
    if len(distinct) > 1:
        msg = f"shapes {' and '.join(str(list(shape)) for shape in shapes)} do not broadcast"
        raise ValueError(msg)
    return distinct.pop() if distinct else 1


# -- patterns --------------------------------------------------------------------------------------------------------

Names = tuple[str | None, ...]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Term:
    """One operand or output: whether it has leading dims, and its named dims, each with whether it may be sharded."""

    batch: bool
    dims: tuple[tuple[str, bool], ...]


@cache
def _parse(text: str) -> tuple[dict[str, Term], tuple[Term, ...]]:
    left, _, right = text.partition("->")
    operands = dict(operand.split(maxsplit=1) for operand in left.split(","))
    outputs = [output.strip() for output in right.split(",")]
    return {name: _term(dims) for name, dims in operands.items()}, tuple(map(_term, outputs))


register("notations of rules", _parse)


def _term(text: str) -> Term:
    dims = re.findall(r"\[(\w+)\]|(\w)", text.replace("...", ""))
    return Term(text.startswith("..."), tuple((whole or free, bool(whole)) for whole, free in dims))


def pattern(
    call: OpCall,
    text: str,
    sizes: Mapping[str, int | Callable[[Sizes], int]] | None = None,
    *,
    each: Sequence[str] = (),
    full: bool = False,
) -> Strategies:
    """Return the rows and shapes that ``text`` implies for ``call``.

    Args:
        call: the call.
        text: the pattern.
        sizes: sizes of dims that only outputs have: numbers, or functions of the sizes of the operands' dims.
        each: names of operands in each of which the operator is linear while the others are fixed.
        full: True where the local call does not accept empty shards.

    Returns:
        the rows, and the outputs' shapes.

    Raises:
        ValueError: an operand does not match the pattern.
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
    whole = {name for term in (*terms, *outputs) for name, stays in term.dims if stays}
    rows = [replicated_row(len(inputs), len(outs))]
    for label in dict.fromkeys(name for names in inputs for name in names if name is not None and name not in whole):
        rows.extend(_pattern_rows(label, inputs, outs, shapes))
    linear = [index for index, operand in enumerate(call.operands) if operand.name in each]
    rows.extend(_partial_row((index,), op, len(inputs), len(outs)) for index in linear for op in LINEAR_OPS)
    return Strategies(nonempty(rows) if full else tuple(rows), shapes, many=len(outs) > 1)


def _bind(operand: Operand, term: Term, known: Sizes) -> tuple[int, ...]:
    """Record the sizes of the named dims of ``operand`` in ``known`` and return the sizes of its leading dims."""
    leading = operand.ndim - len(term.dims)
    if leading < 0 or (leading and not term.batch):
        msg = f"{operand.name} has {operand.ndim} dims, it needs {'at least ' * term.batch}{len(term.dims)}"
        raise ValueError(msg)
    for (name, _), size in zip(term.dims, operand.shape[leading:], strict=True):
        if known.setdefault(name, size) != size:
            msg = f"{operand.name} {list(operand.shape)} does not match: dim {name} has size {known[name]} elsewhere"
            raise ValueError(msg)
    return operand.shape[:leading]


def _pattern_rows(
    label: str, inputs: Sequence[Names], outs: Sequence[Names], shapes: Sequence[tuple[int, ...]]
) -> Iterator[Row]:
    """Yield the row that shards ``label`` wherever it occurs, unless a non-empty output lacks the label."""
    if all(label in names or 0 in shape for names, shape in zip(outs, shapes, strict=True)):
        yield Row(
            tuple(_placement(names, label) for names in inputs), tuple(_placement(names, label) for names in outs)
        )


def pattern_rule(
    text: str, *, each: Sequence[str] = (), full: bool = False, **sizes: int | Callable[[Sizes], int]
) -> Callable[[OpCall], Strategies]:
    """Return the placement function of an operator that has the pattern ``text`` in every call; see :func:`pattern`."""
    return lambda call: pattern(call, text, sizes, each=each, full=full)

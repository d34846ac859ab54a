"""Labelled dims: an einsum-like description of an operator, turned into rows.

``labels(inputs=[("b", "k"), ("n", "k")], outputs=[("b", "n")])`` says which dims of which operands run together. A
label in an input and an output may be sharded in both; a label missing from the output is reduced, if the operator
reduces by addition; a label in ``whole`` may not be sharded. A dim labelled None (broadcast, size 1) stays whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.rule import R, Row, replicated_row

__all__ = ["Labels", "broadcast_labels", "held_row", "held_rows", "labelled_rows"]

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


def held_rows(labels: Labels) -> tuple[Row, ...]:
    """As :func:`labelled_rows`, for local calls that do not work on nothing."""
    return tuple(map(held_row, labelled_rows(labels)))


def held_row(row: Row) -> Row:
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

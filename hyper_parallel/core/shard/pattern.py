"""Signatures as text: ``"x ...[m][n], tau ...[k] -> ...[m][n]"``, brackets around the dims that must be whole.

``...`` stands for leading dims that broadcast against each other and run through. A bare letter is a dim that may be
sharded, in every operand and output that has it. Operands are named, so that one which was not given drops out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.rule import R, Row, Strategies, replicated_row
from hyper_parallel.core.shard.signature import LINEAR_OPS, broadcast_labels

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall, Operand

__all__ = ["nonempty", "pattern", "patterned"]

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
        rows.extend(_shard_rows(label, inputs, outs, shapes))
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


def _shard_rows(
    label: str, inputs: Sequence[Names], outs: Sequence[Names], shapes: Sequence[tuple[int, ...]]
) -> Iterator[Row]:
    """``label`` sharded wherever it stands; an output without it must be empty, which is the same on every rank."""
    if all(label in names or 0 in shape for names, shape in zip(outs, shapes, strict=True)):
        yield Row(tuple(_placed(label, names) for names in inputs), tuple(_placed(label, names) for names in outs))


def _placed(label: str, names: Names) -> Placement:
    return Shard(names.index(label)) if label in names else R


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

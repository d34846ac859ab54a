"""Builds the graph of a call with given sizes from two traces: the call on one device, and a rank's local call.

Both traces must have the same steps. The sizes that differ between them are then multiples of one symbol, the size of
the split label (see :mod:`~hyper_parallel.verify.prove.laws`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.verify.frameworks.contract.primitives import Graph, Input, Primitive, Step
from hyper_parallel.verify.frameworks.contract.sizes import Size
from hyper_parallel.verify.prove.laws import UnprovenError

__all__ = ["complete_text", "conditions_met", "paired"]

_LABEL = "s"


def complete_text(arguments: Any) -> str:
    """Return arguments as text, with all elements and digits of arrays; different arguments have different texts."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(arguments)


def paired(whole: Graph, local: Graph, *, ranks: int = 1) -> Graph:
    """Return the graph in which sizes that are smaller in ``local`` are multiples of a symbol.

    Args:
        whole: the call on one device.
        local: the call on a rank.
        ranks: number of ranks that split a dim, for the error message.

    Raises:
        UnprovenError: the two graphs have different steps, or the differing sizes are different fractions.
    """
    names = [[step.name for step in graph.steps] for graph in (whole, local)]
    wiring = [(graph.inputs, graph.outputs, graph.cotangents, graph.gradients) for graph in (whole, local)]
    if names[0] != names[1] or wiring[0] != wiring[1]:
        msg = f"the local call takes different steps from one device{_uneven(whole, local, ranks)}"
        raise UnprovenError(msg)
    differing = {size for sizes in _sizes(whole, local) if (size := tuple(each.number for each in sizes))[0] != size[1]}
    label = math.gcd(*(size for size, _ in differing)) if differing else 1
    if len({size / part if part else 0 for size, part in differing}) > 1 or (label == 0 and differing):
        pairs = ", ".join(f"{part} of {size}" for size, part in sorted(differing))
        msg = f"a rank has {pairs} elements along dims of one call: these are different fractions"
        raise UnprovenError(msg)
    steps = [_step(one, own, label) for one, own in zip(whole.steps, local.steps, strict=True)]
    return replace(whole, steps=tuple(steps), hints={_LABEL: label}, no_backward=whole.no_backward or local.no_backward)


def _uneven(whole: Graph, local: Graph, ranks: int) -> str:
    """Return the end of the error message if operands are split unevenly, else an empty text."""
    pairs = ((one.number, own.number) for at in whole.inputs
             for one, own in zip(whole.steps[at].shape, local.steps[at].shape, strict=False))  # fmt: skip
    found = next(((size, part) for size, part in pairs if size != part and size % ranks), None)
    if found is None:
        return ""
    size, part = found
    return f": {size} elements do not divide by {ranks} ranks, and this one has {part or 'none'} of them"


def _sizes(whole: Graph, local: Graph) -> Iterator[tuple[Size, Size]]:
    for one, own in zip(whole.steps, local.steps, strict=True):
        if len(one.shape) != len(own.shape):
            msg = f"{one.name}: the local result has other dims"
            raise UnprovenError(msg)
        yield from zip(one.shape, own.shape, strict=True)


def _step(one: Step, own: Step, label: int) -> Step:
    shape = tuple(
        size if size == local else Size(size.number // label, (_LABEL,))
        for size, local in zip(one.shape, own.shape, strict=True)
    )
    if one.name == own.name and Size(0) in own.shape and not isinstance(one.does, Input):
        return replace(one, shape=shape)  # every result has the same empty shard, whatever the call computes
    if one.operands != own.operands or _without_sizes(one.does) != _without_sizes(own.does):
        msg = f"{one.name}: the local call does something different from one device"
        raise UnprovenError(msg)
    return replace(one, shape=shape)


def _without_sizes(does: Any) -> Any:
    return does if not isinstance(does, Primitive) else replace(does, times=(), per=(), values=())


def conditions_met(row: Row, shapes: Sequence[Sequence[int]], ranks: int) -> Row:
    """Return the row with only the conditions that these global shapes of the operands meet."""
    split = [(index, place.dim) for index, place in enumerate(row.inputs) if isinstance(place, Shard)]
    sizes = {pair: shapes[pair[0]][pair[1]] for pair in split}
    even = tuple(pair for pair, size in sizes.items() if size % ranks == 0)
    full = tuple(pair for pair, size in sizes.items() if size > -(-size // ranks) * (ranks - 1))
    others = tuple((*pair, other) for pair, size in sizes.items() for other in _divisors(size) if other % ranks == 0)
    return Row(row.inputs, row.outputs, even=even, full=full, sizes=others)


def _divisors(size: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(size) + 1) if size % each == 0]
    return [*small, *(size // each for each in small)]

"""Views: dims are kept, merged or split, never mixed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.core.shard.call import LocalCall
from hyper_parallel.core.shard.rule import Row, Strategies, replicated_row, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.shard.call import OpCall

__all__ = ["view_groups"]


@rule("view", "x, *shape", view=True)
def view(call: OpCall) -> Strategies:
    """The leading dim of each group of merged or split dims may be sharded where all chunks hold whole rows of it."""
    x = call["x"]
    shape = _target(x.shape, call["shape"])
    rows = [replicated_row(1), *(Row((Partial(op),), (Partial(op),)) for op in ("sum", "avg", "max", "min"))]
    rows.extend(_group_rows(x.shape, shape))
    return Strategies(tuple(rows), (shape,), _local_shape)


def _local_shape(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del call, targets
    return LocalCall({"shape": outputs[0].local_shape})


def _target(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    sizes = list(wanted)
    if sizes.count(-1) > 1 or any(size < -1 for size in sizes):
        msg = f"invalid shape {sizes}"
        raise ValueError(msg)
    elements = math.prod(shape)
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        if rest == 0 or elements % rest:
            msg = f"shape {sizes} is invalid for {list(shape)}"
            raise ValueError(msg)
        sizes[sizes.index(-1)] = elements // rest
    if math.prod(sizes) != elements:
        msg = f"shape {sizes} is invalid for {list(shape)}"
        raise ValueError(msg)
    return tuple(sizes)


def view_groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of source dims and target dims that hold the same elements; size-1 dims belong to no run."""
    groups = []
    left = [dim for dim, size in enumerate(source) if size != 1]
    right = [dim for dim, size in enumerate(target) if size != 1]
    while left and right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        have, want = source[ins[0]], target[outs[0]]
        while have != want:
            if have < want:
                ins.append(left.pop(0))
                have *= source[ins[-1]]
            else:
                outs.append(right.pop(0))
                want *= target[outs[-1]]
        groups.append((ins, outs))
    return groups


def _group_rows(source: Sequence[int], target: Sequence[int]) -> Iterator[Row]:
    if 0 in source:
        return
    for ins, outs in view_groups(source, target):
        kept = len(ins) == len(outs) == 1
        first, lead = ins[0], outs[0]
        # A chunk of the leading source dim must be a chunk of the leading target dim: both sizes must divide.
        yield Row(
            (Shard(first),),
            (Shard(lead),),
            even=() if kept else ((0, first),),
            sizes=() if kept else ((0, first, target[lead]),),
        )

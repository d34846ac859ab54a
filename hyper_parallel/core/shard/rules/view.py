"""Views by shape, by storage and as pairs of real numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.labels import Labels, labelled_rows
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Row, Strategies, decomposition, replicated_row, rule
from hyper_parallel.core.shard.sample import booleans, complex_, real, sample, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyper_parallel.core.dtensor.layout import Layout


__all__ = ["PASSING", "addressed", "passing_rows", "view_groups"]


PASSING = ("sum", "avg", "max", "min", "prod", "all", "any")


def passing_rows(inputs: int = 1, outputs: int = 1) -> Iterator[Row]:
    """Rows of an operator that only moves elements: whole operands, and Partial of every reduction."""
    yield replicated_row(inputs, outputs)
    for op in PASSING:
        yield Row((Partial(op),) * inputs, (Partial(op),) * outputs)


@rule("view", "x, *shape", view=True)
def view(call: OpCall) -> Strategies:
    """The leading dim of each group of merged or split dims may be sharded if every shard holds complete rows of it."""
    x = call["x"]
    shape = _target(x.shape, call["shape"])
    return Strategies((*passing_rows(), *_group_rows(x.shape, shape)), (shape,), _local_shape)


def _local_shape(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del call, targets
    return LocalCall({"shape": outputs[0].local_shape})


def _target(shape: Sequence[int], wanted: Sequence[Any]) -> tuple[int, ...]:
    sizes = list(wanted)
    if not all(isinstance(size, int) for size in sizes):
        msg = f"view as {sizes}: only sizes are supported; reinterpret the bits of to_local() instead"
        raise ValueError(msg)
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
    """Minimal groups of adjacent source and target dims that hold the same elements; size-1 dims belong to no group."""
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
        if len(ins) == len(outs) == 1:
            yield Row((Shard(ins[0]),), (Shard(outs[0]),))
            continue
        yield _leading_row(ins[0], outs[0], target)
        if len(outs) == 1:
            yield from _merging_rows(source, ins, outs[0])
        elif len(ins) == 1:
            yield from _splitting_rows(ins[0], target, outs)


def _leading_row(first: int, lead: int, target: Sequence[int]) -> Row:
    # A shard of the leading source dim must be a shard of the leading target dim: both sizes must divide.
    return Row((Shard(first),), (Shard(lead),), even=((0, first),), sizes=((0, first, target[lead]),))


def _merging_rows(source: Sequence[int], ins: list[int], lead: int) -> Iterator[Row]:
    # An inner dim may be sharded once the axes before this one shard every dim before it down to single rows.
    for position in range(1, len(ins)):
        before = tuple((0, dim, source[dim]) for dim in ins[:position])
        yield Row((Shard(ins[position]),), (Shard(lead),), even=((0, ins[position]),), cut=before)


def _splitting_rows(first: int, target: Sequence[int], outs: list[int]) -> Iterator[Row]:
    done = 1
    for position in range(1, len(outs)):
        done *= target[outs[position - 1]]
        # The axes before shard exactly the dims before; this axis must divide the next one.
        yield Row(
            (Shard(first),),
            (Shard(outs[position]),),
            cut=((0, first, done, target[outs[position]]),),
        )


@decomposition("flatten", "x, start_dim=0, end_dim=-1")
def flatten(ops: Any, x: Any, start_dim: int, end_dim: int) -> Any:
    """Merge adjacent dims into one."""
    shape = tuple(x.shape)
    if not shape:
        return ops.view(x, (1,))
    first, last = start_dim % len(shape), end_dim % len(shape)
    if first > last:
        msg = f"flatten: start_dim {start_dim} comes after end_dim {end_dim}"
        raise ValueError(msg)
    return ops.view(x, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


@decomposition("unflatten", "x, dim, sizes")
def unflatten(ops: Any, x: Any, dim: int, sizes: Sequence[int]) -> Any:
    """Split one dim into several."""
    shape = tuple(x.shape)
    position = dim % len(shape)
    split = _target((shape[position],), sizes)
    return ops.view(x, (*shape[:position], *split, *shape[position + 1 :]))


@decomposition("view_as", "x, other")
def view_as(ops: Any, x: Any, other: Any) -> Any:
    """``view`` with the shape of another tensor, whose layout does not matter."""
    return ops.view(x, tuple(other.shape))


PAIR = 2


@rule("view_as_real", "x", view=True)
def view_as_real(call: OpCall) -> Strategies:
    """``… -> …[2]``, linear: the new dim (real and imaginary part) is whole, the others may be sharded."""
    x = call["x"]
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    labels = Labels((names,), ((*names, None),), None, joint=(0,))
    return Strategies(_filled(labels), ((*x.shape, PAIR),))


@rule("view_as_complex", "x", view=True)
def view_as_complex(call: OpCall) -> Strategies:
    """``…[2] -> …``, linear: the last dim (real and imaginary part) must be whole, the others may be sharded."""
    x = call["x"]
    if x.shape[-1:] != (PAIR,):
        msg = f"the last dim holds real and imaginary part, x is {list(x.shape)}"
        raise ValueError(msg)
    names = tuple(f"d{dim}" for dim in range(x.ndim - 1))
    labels = Labels(((*names, None),), (names,), None, joint=(0,))
    return Strategies(_filled(labels), (x.shape[:-1],))


def _filled(labels: Labels) -> tuple[Row, ...]:
    """Rows without empty shards, which PyTorch's checks of strides refuse, forward and backward."""
    dims: dict[Placement, int] = {Shard(dim): dim for dim in range(len(labels.inputs[0]))}
    return tuple(
        replace(row, full=((0, dims[row.inputs[0]]),)) if row.inputs[0] in dims else row
        for row in labelled_rows(labels)
    )


# -- storage -----------------------------------------------------------------------------------------------------------


def addressed(call: OpCall, shape: Sequence[int]) -> Strategies:
    """Strategies of an operator that addresses storage by strides: ``x`` must already be whole on every rank."""
    layout = call["x"].layout
    if any(layout.dim_axes) or layout.partials:
        msg = "strides address storage, of which ranks have different shards; x = x.redistribute().contiguous() first"
        raise ValueError(msg)
    return Strategies((replicated_row(len(call.operands)),), (tuple(shape),))


@rule("as_strided", "x, size, stride, storage_offset=None", view=True)
def as_strided(call: OpCall) -> Strategies:
    """A view of storage by sizes and strides; ``x`` must already be whole."""
    return addressed(call, call["size"])


# -- samples -----------------------------------------------------------------------------------------------------------

sample("view", real("abc"), (size("ab"), size("c")))
sample("view", real("abc"), (size("a"), -1))
sample("view", real("abc"), (-1,))
sample("view", real("ab"), (size("b"), size("a")))
sample("view", real(4, "b", 6), (2, 2, size("b"), 3, 2))
sample("view", real(4, "b", 4), (2, 2, size("b"), 2, 2))
sample("view", real(2, 1, 4), (8,))
sample("view", real(12, "b"), (3, 4, size("b")))
sample("view", real(2, 6, "b"), (12, size("b")))
sample("view", real("ab"), (size("a"), 1, size("b"), 1))
sample("flatten", real("abc"))
sample("flatten", real("abc"), 1)
sample("unflatten", real("a", 12), 1, (3, 4))
sample("unflatten", real(6, "b"), 0, (2, -1))
sample("view_as", real("ab"), real("ba").fixed)
sample("view", booleans("abc"), (size("ab"), size("c")))
sample("view_as_real", complex_("ab"))
sample("view_as_complex", real("ab2"))
sample("as_strided", real("6"), (2, 3), (1, 2))

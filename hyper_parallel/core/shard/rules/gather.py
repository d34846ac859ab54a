"""Gathering and scattering along a dim."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.call import LocalCall, Operand
from hyper_parallel.core.shard.rule import R, Row, Strategies, decomposition, replicated_row, rule
from hyper_parallel.core.shard.rules.dims import normal_dim
from hyper_parallel.core.shard.sample import real, sample, shuffled, size, whole
from hyper_parallel.core.shard.signature import Labels, labelled_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.shard.call import OpCall

__all__ = ["lookup", "window"]

Names = tuple[str | None, ...]


def lookup(rows: tuple[Row, ...], table: int, dim: int, operands: int) -> tuple[Row, ...]:
    """``rows``, and one for a table sharded along the dim that is looked up: each rank adds what it finds."""
    held: list[Placement] = [R] * operands
    held[table] = Shard(dim)
    return (*rows, Row(tuple(held), (Partial("sum"),)))


def window(layout: Layout, dim: int) -> dict[str, Any]:
    """The argument ``window`` of a lookup in a sharded dim: the range of indices held here, and the whole size."""
    return {"window": (*layout.local_box()[dim], layout.shape[dim])} if layout.dim_axes[dim] else {}  # type: ignore[index]


def _names(shape: Sequence[int], others: Sequence[Sequence[int]], dim: int, own: str) -> Names:
    """Labels of dims that all operands hold alike; ``own`` is the label of ``dim``, other dims are whole."""
    return tuple(
        own if one == dim else f"d{one}" if all(other[one] == size for other in others) else f"{own}{one}"
        for one, size in enumerate(shape)
    )


@rule("gather", "x, dim, index, *, sparse_grad=False", by_dtype=True)
def gather(call: OpCall) -> Strategies:
    """``…k…, …i… -> …i…``: the other dims run together; a sharded ``k`` is looked up where it lives."""
    x, index = call["x"], call["index"]
    dim = normal_dim(call["dim"], x.ndim)
    if x.ndim != index.ndim:
        if max(x.ndim, index.ndim) > 1 and 0 not in index.shape:
            msg = f"x has {x.ndim} dims, index has {index.ndim}"
            raise ValueError(msg)
        return Strategies((replicated_row(2),), (index.shape,))
    shapes = (x.shape, index.shape)
    whole = _whole(shapes, dim, "x")
    names = _names(index.shape, shapes, dim, "i")
    labels = Labels((_names(x.shape, shapes, dim, "x"), names), (names,), whole=frozenset(whole), each=(0,))
    rows = labelled_rows(labels)
    if x.floating and not call["sparse_grad"] and x.ndim:
        rows = lookup(rows, 0, dim, 2)

    def local(_: OpCall, targets: tuple[Layout, ...], __: tuple[Layout, ...]) -> LocalCall | None:
        found = window(targets[0], dim) if targets[0].ndim else {}
        return LocalCall(found) if found else None

    return Strategies(rows, (index.shape,), local)


def _whole(shapes: Sequence[Sequence[int]], dim: int, table: str) -> set[str]:
    unequal = [one for one in range(len(shapes[0])) if one != dim and len({shape[one] for shape in shapes}) > 1]
    return {table, *(f"{own}{one}" for one in unequal for own in "xis")}


@rule("index_select", "x, dim, index", by_dtype=True)
def index_select(call: OpCall) -> Strategies:
    """``…k…, i -> …i…``: the other dims run through; a sharded ``k`` is looked up where it lives."""
    x, index = call["x"], call["index"]
    dim = normal_dim(call["dim"], x.ndim)
    if index.ndim > 1:
        msg = f"index has {index.ndim} dims, it needs at most 1"
        raise ValueError(msg)
    if not x.ndim:
        return Strategies((replicated_row(2),), ((),))
    names = tuple("x" if one == dim else f"d{one}" for one in range(x.ndim))
    (count,) = index.shape or (1,)
    out = (*names[:dim], "i" if index.ndim else None, *names[dim + 1 :])
    rows = labelled_rows(Labels((names, ("i",) * index.ndim), (out,), whole=frozenset({"x"}), each=(0,)))
    if x.floating:
        rows = lookup(rows, 0, dim, 2)

    def local(_: OpCall, targets: tuple[Layout, ...], __: tuple[Layout, ...]) -> LocalCall | None:
        found = window(targets[0], dim)
        return LocalCall(found) if found else None

    return Strategies(rows, ((*x.shape[:dim], count, *x.shape[dim + 1 :]),), local)


@decomposition("take_along_dim", "x, indices, dim=None")
def take_along_dim(ops: Any, x: Any, indices: Any, dim: int | None) -> Any:
    """``gather`` with the other dims broadcast."""
    if dim is None:
        return ops.take(x, ops.view(indices, (-1,)))
    left, right = tuple(x.shape), tuple(indices.shape)
    if len(left) != len(right):
        msg = f"take_along_dim: x has {len(left)} dims, indices have {len(right)}"
        raise ValueError(msg)
    at = normal_dim(dim, len(left))
    indices = ops.add(indices, ops.mul(ops.lt(indices, 0), left[at]))  # gather does not count from the end
    common = [max(pair) if 0 not in pair else 0 for pair in zip(left, right, strict=True)]
    wide = [(*common[:at], sizes[at], *common[at + 1 :]) for sizes in (left, right)]
    return ops.gather(ops.expand(x, wide[0]), at, ops.expand(indices, wide[1]))


def _scattered(call: OpCall, source: Any, *, adds: bool, linear: bool = True) -> Strategies:
    x, index = call["x"], call["index"]
    dim = normal_dim(call["dim"], x.ndim)
    tensors = [x, index, source] if isinstance(source, Operand) else [x, index]
    if 0 in index.shape or (max(one.ndim for one in tensors) <= 1 and not all(one.ndim for one in tensors)):
        return Strategies((replicated_row(len(tensors)),), (x.shape,))
    if any(one.ndim != x.ndim for one in tensors):
        msg = f"{', '.join(f'{one.name} has {one.ndim} dims' for one in tensors)}; they must have as many"
        raise ValueError(msg)
    shapes = [one.shape for one in tensors]
    whole = _whole(shapes, dim, "x")
    # Where the source is longer than the index, only its beginning is read.
    aligned = adds and len(tensors) == 3 and index.shape[dim : dim + 1] == source.shape[dim : dim + 1]
    owns = ("x", "i", "i" if aligned else "s")
    inputs = tuple(_names(shape, shapes, dim, own) for shape, own in zip(shapes, owns, strict=False))
    if not aligned:
        whole |= {"i", "s"}
    joint = (0, 2) if linear and len(tensors) == 3 and source.floating == x.floating else ()
    labels = Labels(
        inputs, (inputs[0],), whole=frozenset(whole), joint=joint, joins=(0,) if aligned else (), reduce="sum"
    )
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("scatter", "x, dim, index, src=None, *, value=None, reduce=None")
def scatter(call: OpCall) -> Strategies:
    """The other dims run together; the scattered one is whole. Linear, unless what is there takes part."""
    source = call["value"] if call["src"] is None else call["src"]
    return _scattered(call, source, adds=False, linear=call["reduce"] is None)


@rule("scatter_reduce", "x, dim, index, src, reduce, *, include_self=True")
def scatter_reduce(call: OpCall) -> Strategies:
    """As ``scatter``; what reaches one place is reduced there."""
    return _scattered(call, call["src"], adds=False, linear=False)


@rule("scatter_add", "x, dim, index, src")
def scatter_add(call: OpCall) -> Strategies:
    """The other dims run together; sources sharded along the dim leave a sum pending, which ``x`` joins once."""
    return _scattered(call, call["src"], adds=True)


@rule("index_add", "x, dim, index, source, *, alpha=1", by_value=True)
def index_add(call: OpCall) -> Strategies:
    """``…k…, i, …i… -> …k…``: sources sharded along ``i`` leave a sum pending, which ``x`` joins once."""
    x, source, index = call["x"], call["source"], call["index"]
    dim = normal_dim(call["dim"], x.ndim)
    if not x.ndim and math.prod(source.shape) == math.prod(index.shape) == 1:
        return Strategies((replicated_row(3),), ((),))
    rests = [one.shape[:dim] + one.shape[dim + 1 :] for one in (x, source)]
    if not x.ndim or index.ndim != 1 or rests[0] != rests[1] or source.shape[dim] != index.shape[0]:
        msg = f"x {list(x.shape)}, index {list(index.shape)} and source {list(source.shape)} do not fit along dim {dim}"
        raise ValueError(msg)
    names = [tuple(own if one == dim else f"d{one}" for one in range(x.ndim)) for own in "xi"]
    labels = Labels((names[0], ("i",), names[1]), (names[0],), whole=frozenset({"x"}), joint=(0, 2), joins=(0,))
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("one_hot", "x, num_classes=-1")
def one_hot(call: OpCall) -> Strategies:
    """Every dim of the classes' numbers runs through; the new one is whole."""
    x, count = call["x"], call["num_classes"]
    if count < 1:
        msg = f"num_classes is {count}; give a positive number: the size of the result must not depend on values"
        raise ValueError(msg)
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    return Strategies(labelled_rows(Labels((names,), ((*names, None),), reduce=None)), ((*x.shape, count),))


sample("gather", real("ab"), 0, whole("a", "ib"))
sample("gather", real("ab"), 1, whole("b", "ai"))
sample("gather", real("a", 6, "c"), 0, whole("a", "i", 4, "c"))
sample("index_select", real("abc"), 1, whole("b", "i"))
sample("index_select", real("ab"), 0, whole("a", "i"))
sample("take_along_dim", real("ab"), whole("b", "ai"), 1)
sample("take_along_dim", real("ab"), whole("b", "1i"), 1)
sample("take_along_dim", real("ab"), whole("ab", "i"))
sample("scatter", real(9, "b"), 0, shuffled(9, 4, "b"), real(4, "b"))
sample("scatter", real("a", 9), 1, shuffled(9, "a", 4, dim=1), real("a", 4))
sample("scatter", real("a", 9), 1, shuffled(9, "a", 4, dim=1), 1.5)
sample("scatter_add", real("ab"), 0, whole("a", "ib"), real("ib"))
sample("scatter_add", real("ab"), 1, whole("b", "ai"), real("ai"))
sample("scatter_add", real("a", 6), 0, whole("a", "i", 4), real("i", 5).fixed)
sample("index_add", real("abc"), 0, whole("a", "i"), real("ibc"))
sample("index_add", real("ab"), 1, whole("b", "i"), real("ai"), alpha=2)
sample("one_hot", whole(5, "ab"), 5)
sample("one_hot", whole("k", "a"), size("k"))
sample("scatter_reduce", real("ab"), 1, whole("b", "ai"), real("ai"), "sum")
sample("scatter_reduce", real("ab"), 0, whole("a", "ib"), real("ib"), "mean", include_self=False)
sample("scatter_reduce", real("ab"), 0, whole("a", "ib"), real("ib"), "amax")
sample("scatter", real("ab").fixed, 0, whole("a", "ib"), real("ib").fixed, reduce="add")
sample("scatter", real("a", 9), 1, shuffled(9, "a", 4, dim=1), value=1.5)

"""Operators that rearrange, drop, slice or stretch dims: a dim that stays as it is may be sharded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.labels import LINEAR_OPS
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Row, Strategies, decomposition, replicated_row, rule
from hyper_parallel.core.shard.sample import booleans, indices, real, sample, size
from hyper_parallel.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyper_parallel.core.dtensor.layout import Layout


__all__ = ["diagonal_length", "keep_dims", "keep_dims_linear", "normalize_dim", "passing_rows"]

_PASSING = ("sum", "avg", "max", "min", "prod", "all", "any")


def normalize_dim(dim: int, ndim: int) -> int:
    """Return ``dim`` counted from the left.

    Raises:
        ValueError: the tensor has no such dim.
    """
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        msg = f"dim {dim} does not exist in a tensor of {ndim} dims"
        raise ValueError(msg)
    return dim % max(ndim, 1)


def passing_rows(inputs: int = 1, outputs: int = 1) -> Iterator[Row]:
    """Yield the rows of an operator that only moves elements: Partial passes with every reduction."""
    yield replicated_row(inputs, outputs)
    for op in _PASSING:
        yield Row((Partial(op),) * inputs, (Partial(op),) * outputs)


def keep_dims(kept: Sequence[int | None], outputs: int = 1) -> tuple[Row, ...]:
    """Rows of an operator whose output dim ``d`` is input dim ``kept[d]`` unchanged, or a new dim if that is None."""
    return (
        *passing_rows(1, outputs),
        *(Row((Shard(dim),), (Shard(out),) * outputs) for out, dim in enumerate(kept) if dim is not None),
    )


def keep_dims_linear(kept: Sequence[int | None]) -> tuple[Row, ...]:
    """The rows of :func:`keep_dims` for an operator that adds or drops elements: only Partial sum and avg pass."""
    return tuple(row for row in keep_dims(kept) if all(_is_sum(placement) for placement in row.inputs))


def _is_sum(placement: Placement) -> bool:
    return not isinstance(placement, Partial) or placement.reduce_op in LINEAR_OPS


def _permuted(call: OpCall, order: Sequence[int]) -> Strategies:
    return Strategies(keep_dims(order), (tuple(call["x"].shape[dim] for dim in order),))


@rule("transpose", "x, dim0, dim1", view=True)
def transpose(call: OpCall) -> Strategies:
    """Two dims are swapped; any dim may be sharded."""
    ndim = call["x"].ndim
    first, second = normalize_dim(call["dim0"], ndim), normalize_dim(call["dim1"], ndim)
    order = list(range(ndim))
    if ndim:
        order[first], order[second] = second, first
    return _permuted(call, order)


@rule("permute", "x, *dims", view=True)
def permute(call: OpCall) -> Strategies:
    """Dims in a new order; any dim may be sharded."""
    ndim = call["x"].ndim
    order = [normalize_dim(dim, ndim) for dim in call["dims"]]
    if sorted(order) != list(range(ndim)):
        msg = f"dims {list(call['dims'])} must be a permutation of the {ndim} dims"
        raise ValueError(msg)
    return _permuted(call, order)


@rule("movedim", "x, source, destination", view=True)
def movedim(call: OpCall) -> Strategies:
    """Some dims move, the others keep their order; any dim may be sharded."""
    ndim = call["x"].ndim
    pairs = [
        [normalize_dim(dim, ndim) for dim in ((value,) if isinstance(value, int) else value)]
        for value in (call["source"], call["destination"])
    ]
    if len(pairs[0]) != len(pairs[1]) or any(len(set(dims)) != len(dims) for dims in pairs):
        msg = (
            f"source {call['source']} and destination {call['destination']} must have the same number of dims, each "
            "without repetition"
        )
        raise ValueError(msg)
    moved = dict(zip(pairs[1], pairs[0], strict=True))
    rest = iter(dim for dim in range(ndim) if dim not in pairs[0])
    return _permuted(call, [moved[out] if out in moved else next(rest) for out in range(ndim)])


@rule("t", "x", view=True)
def t(call: OpCall) -> Strategies:
    """The dims of a matrix are swapped; a vector or number stays as it is."""
    ndim = call["x"].ndim
    if ndim > 2:
        msg = f"t() takes at most 2 dims, x has {ndim}"
        raise ValueError(msg)
    return _permuted(call, range(ndim)[::-1])


@rule("reversed_dims", "x", view=True)
def reversed_dims(call: OpCall) -> Strategies:
    """``x.T``: all dims in reverse order."""
    return _permuted(call, range(call["x"].ndim)[::-1])


@rule("matrix_transpose", "x", view=True)
def matrix_transpose(call: OpCall) -> Strategies:
    """``x.mT``: the last two dims are swapped."""
    ndim = call["x"].ndim
    if ndim < 2:
        msg = f"mT takes at least 2 dims, x has {ndim}"
        raise ValueError(msg)
    return _permuted(call, (*range(ndim - 2), ndim - 1, ndim - 2))


@rule("squeeze", "x, dim=None", view=True)
def squeeze(call: OpCall) -> Strategies:
    """Dims of global size 1 are removed; a dim that is 1 only on this rank stays."""
    x, dim = call["x"], call["dim"]
    dims = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    named = [normalize_dim(d, x.ndim) for d in dims]
    gone = tuple(d for d in named if x.ndim and x.shape[d] == 1)
    kept = [d for d in range(x.ndim) if d not in gone]

    def local(*_: Any) -> LocalCall:
        return LocalCall({"dim": gone})

    return Strategies(keep_dims(kept), (tuple(x.shape[d] for d in kept),), local)


@rule("unsqueeze", "x, dim", view=True)
def unsqueeze(call: OpCall) -> Strategies:
    """A new dim of size 1 is not sharded; the others may be sharded."""
    x = call["x"]
    position = normalize_dim(call["dim"], x.ndim + 1)
    kept: list[int | None] = list(range(x.ndim))
    kept.insert(position, None)
    return Strategies(keep_dims(kept), ((*x.shape[:position], 1, *x.shape[position:]),))


@rule("expand", "x, *shape", view=True)
def expand(call: OpCall) -> Strategies:
    """A stretched dim must not be sharded, the others may be sharded; the local call gets local sizes."""
    x, wanted = call["x"], call["shape"]
    new = len(wanted) - x.ndim
    source = (*(None for _ in range(new)), *x.shape)
    if new < 0 or any(size != -1 and have not in (None, 1, size) for size, have in zip(wanted, source, strict=True)):
        msg = f"sizes {list(wanted)} cannot be expanded from {list(x.shape)}"
        raise ValueError(msg)
    if -1 in wanted[:new]:
        msg = f"sizes {list(wanted)}: -1 cannot stand for a new dim"
        raise ValueError(msg)
    shape = tuple(have if size == -1 else size for size, have in zip(wanted, source, strict=True))
    kept = [out - new if have == size else None for out, (have, size) in enumerate(zip(source, shape, strict=True))]
    return Strategies(keep_dims(kept), (shape,), _local_sizes)


def _local_sizes(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del call, targets
    return LocalCall({"shape": outputs[0].local_shape})


@decomposition("expand_as", "x, other")
def expand_as(ops: Any, x: Any, other: Any) -> Any:
    """``expand`` to the shape of another tensor, whose layout does not matter."""
    return ops.expand(x, tuple(other.shape))


@rule("narrow", "x, dim, start, length", view=True)
def narrow(call: OpCall) -> Strategies:
    """A range of ``dim``, which must not be sharded unless the range covers it."""
    x, start, length = call["x"], call["start"], call["length"]
    dim = normalize_dim(call["dim"], x.ndim)
    if not isinstance(start, int):
        msg = f"start is {start!r}; it must be an integer"
        raise ValueError(msg)  # noqa: TRY004 - dispatch adds the call to ValueErrors
    size = x.shape[dim]
    if not -size <= start <= size or length < 0 or start % max(size, 1) * (start < size) + length > size:
        msg = f"start {start} and length {length} are not within dim {dim}, which has size {size}"
        raise ValueError(msg)
    kept = [None if d == dim and length != size else d for d in range(x.ndim)]
    shape = tuple(length if d == dim else have for d, have in enumerate(x.shape))

    def local(_: OpCall, __: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
        return LocalCall({"length": outputs[0].local_shape[dim]})

    return Strategies(keep_dims(kept), (shape,), local)


@rule("slice", "x, dim=0, start=None, end=None, step=1", view=True)
def slice_(call: OpCall) -> Strategies:
    """Every ``step``-th element of a range of ``dim``, which must not be sharded unless all elements are taken."""
    x = call["x"]
    dim = normalize_dim(call["dim"], x.ndim)
    length = len(range(*slice(call["start"], call["end"], call["step"]).indices(x.shape[dim])))
    kept = [None if d == dim and length != x.shape[dim] else d for d in range(x.ndim)]
    return Strategies(keep_dims(kept), (tuple(length if d == dim else have for d, have in enumerate(x.shape)),))


@rule("select", "x, dim, index", view=True)
def select(call: OpCall) -> Strategies:
    """One element of ``dim``, which must not be sharded; the other dims may be sharded."""
    x, index = call["x"], call["index"]
    dim = normalize_dim(call["dim"], x.ndim)
    if not isinstance(index, int) or not x.ndim or not -x.shape[dim] <= index < x.shape[dim]:
        msg = f"index {index} does not exist in dim {dim} of {list(x.shape)}"
        raise ValueError(msg)
    kept = [d for d in range(x.ndim) if d != dim]
    return Strategies(keep_dims(kept), (tuple(x.shape[d] for d in kept),))


@rule("diagonal", "x, offset=0, dim1=0, dim2=1", view=True)
def diagonal(call: OpCall) -> Strategies:
    """Two dims, which must not be sharded, become the last dim; the others may be sharded."""
    x, offset = call["x"], call["offset"]
    pair = [normalize_dim(call[name], x.ndim) for name in ("dim1", "dim2")]
    if pair[0] == pair[1]:
        msg = f"dim1 and dim2 are both {pair[0]}"
        raise ValueError(msg)
    length = diagonal_length(x.shape, pair, offset)
    kept = [dim for dim in range(x.ndim) if dim not in pair]
    return Strategies(keep_dims([*kept, None]), ((*(x.shape[dim] for dim in kept), length),))


def diagonal_length(shape: Sequence[int], pair: Sequence[int], offset: int) -> int:
    """The number of elements on the diagonal of the two dims ``pair``."""
    rows, columns = (shape[dim] for dim in pair)
    return max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)


@rule("unfold", "x, dimension, size, step", view=True)
def unfold(call: OpCall) -> Strategies:
    """Windows of ``dimension``, which must not be sharded; the elements of a window are the new last dim."""
    x, size, step = call["x"], call["size"], call["step"]
    dim = normalize_dim(call["dimension"], x.ndim)
    if not x.ndim and size in (0, 1):
        return Strategies(keep_dims([None]), ((size,),))
    if not x.ndim or size > x.shape[dim] or step < 1:
        msg = f"windows of {size} every {step} do not fit dim {dim} of {list(x.shape)}"
        raise ValueError(msg)
    count = (x.shape[dim] - size) // step + 1
    kept = [None if d == dim else d for d in range(x.ndim)]
    return Strategies(keep_dims([*kept, None]), ((*x.shape[:dim], count, *x.shape[dim + 1 :], size),))


@rule("repeat", "x, *repeats")
def repeat(call: OpCall) -> Strategies:
    """A dim that is not repeated may be sharded; the others must not be sharded."""
    x, repeats = call["x"], call["repeats"]
    new = len(repeats) - x.ndim
    if new < 0:
        msg = f"repeats {list(repeats)} name fewer dims than x has ({x.ndim})"
        raise ValueError(msg)
    kept = [out - new if out >= new and count == 1 else None for out, count in enumerate(repeats)]
    shape = tuple(count * size for count, size in zip(repeats, (*(1,) * new, *x.shape), strict=True))
    return Strategies(keep_dims(kept), (shape,))


@decomposition("tile", "x, *dims")
def tile(ops: Any, x: Any, dims: Sequence[int]) -> Any:
    """``repeat``, with missing leading repeats taken as 1."""
    return ops.repeat(x, (1,) * (len(tuple(x.shape)) - len(dims)) + tuple(dims))


@rule("repeat_interleave", "x, repeats, dim=None, *, output_size=None")
def repeat_interleave(call: OpCall) -> Strategies:
    """Repeat each element several times in a row; any dim may be sharded, the repeated one only evenly."""
    x, repeats, dim = call["x"], call["repeats"], call["dim"]
    if not isinstance(repeats, int):
        msg = f"repeats is {repeats!r}; it must be an integer, or a tensor of integers"
        raise ValueError(msg)  # noqa: TRY004 - dispatch adds the call to ValueErrors
    if dim is None:
        return Strategies(tuple(passing_rows()), ((math.prod(x.shape) * repeats,),), _without_size)
    repeated = normalize_dim(dim, x.ndim)
    rows = (
        *keep_dims([None if d == repeated else d for d in range(x.ndim)]),
        Row((Shard(repeated),), (Shard(repeated),), even=((0, repeated),)),
    )
    return Strategies(
        rows, ((*x.shape[:repeated], x.shape[repeated] * repeats, *x.shape[repeated + 1 :]),), _without_size
    )


def _without_size(*_: Any) -> LocalCall:
    return LocalCall({"output_size": None})


@decomposition("repeat_each", "x, repeats=None, dim=None, *, output_size=None")
def repeat_each(ops: Any, x: Any, repeats: Any, dim: int | None, output_size: int | None) -> Any:
    """``repeat_interleave`` by one number, or by a count per element; these counts determine the result's size."""
    if repeats is None:
        return ops.counts_to_index(x, output_size=output_size)
    if not ops.platform.is_tensor(repeats):
        return ops.repeat_interleave(x, repeats, dim, output_size=output_size)
    if dim is None:
        x, dim = ops.view(x, (-1,)), 0
    size = tuple(x.shape)[normalize_dim(dim, len(tuple(x.shape)))]
    counts = ops.expand(ops.view(repeats, (-1,)), (size,)) if math.prod(tuple(repeats.shape)) == 1 else repeats
    if tuple(counts.shape) != (size,):
        msg = (
            f"repeat_interleave: repeats has shape {list(counts.shape)}; dim {dim} of {list(x.shape)} needs [{size}], "
            "or one number"
        )
        raise ValueError(msg)
    return ops.index_select(x, dim, ops.counts_to_index(counts, output_size=output_size))


def _moved(call: OpCall, dims: Any) -> Strategies:
    x = call["x"]
    moved = {normalize_dim(dim, x.ndim) for dim in ((dims,) if isinstance(dims, int) else dims)}
    return Strategies(keep_dims([None if dim in moved else dim for dim in range(x.ndim)]), (x.shape,))


@rule("roll", "x, shifts, dims=None")
def roll(call: OpCall) -> Strategies:
    """A rolled dim must not be sharded; without ``dims``, no dim may be sharded."""
    dims = call["dims"]
    flat = dims is None or (isinstance(dims, (list, tuple)) and not dims)
    return _moved(call, range(call["x"].ndim) if flat else dims)


@rule("flip", "x, *dims")
def flip(call: OpCall) -> Strategies:
    """A flipped dim must not be sharded; the others may be sharded."""
    return _moved(call, call["dims"])


@decomposition("rot90", "x, k=1, dims=(0, 1)")
def rot90(ops: Any, x: Any, k: int, dims: Any) -> Any:
    """Quarter turns in the plane of two dims: one dim is flipped, then both are swapped."""
    first, second = dims
    if k % 2:
        return ops.clone(ops.transpose(ops.flip(x, (first if k % 4 == 3 else second,)), first, second))
    return ops.flip(x, (first, second)) if k % 4 else ops.clone(x)


def _triangle(call: OpCall) -> Strategies:
    """All dims may be sharded: the local call shifts the diagonal by the offset of the local shard."""
    x = call["x"]
    if x.ndim < 2:
        msg = f"x needs at least 2 dims, it has {x.ndim}"
        raise ValueError(msg)
    return Strategies(keep_dims(range(x.ndim)), (x.shape,), _local_diagonal)


def _local_diagonal(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    del targets
    (row, _), (column, _) = outputs[0].local_box()[-2:]
    return LocalCall({"diagonal": call["diagonal"] + row - column}) if row != column else None


rule("tril", "x, diagonal=0")(_triangle)
rule("triu", "x, diagonal=0")(_triangle)


# -- diagonals ---------------------------------------------------------------------------------------------------------


@rule("diag_embed", "x, offset=0, dim1=-2, dim2=-1")
def diag_embed(call: OpCall) -> Strategies:
    """The last dim must not be sharded and becomes the diagonal of two new dims; the others may be sharded."""
    x, offset = call["x"], call["offset"]
    if not x.ndim:
        msg = "x needs at least 1 dim"
        raise ValueError(msg)
    pair = [normalize_dim(call[name], x.ndim + 1) for name in ("dim1", "dim2")]
    if pair[0] == pair[1]:
        msg = f"dim1 and dim2 are both {pair[0]}"
        raise ValueError(msg)
    rest = iter(range(x.ndim - 1))
    kept = [None if out in pair else next(rest) for out in range(x.ndim + 1)]
    side = x.shape[-1] + abs(offset)
    return Strategies(keep_dims_linear(kept), (tuple(side if dim is None else x.shape[dim] for dim in kept),))


@decomposition("diag", "x, diagonal=0")
def diag(ops: Any, x: Any, diagonal: int) -> Any:
    """The matrix with a vector on its diagonal, or the diagonal of a matrix."""
    ndim = len(tuple(x.shape))
    if ndim not in (1, 2):
        msg = f"diag: x needs 1 or 2 dims, it has {ndim}"
        raise UnsupportedOperatorError(msg)
    return ops.diag_embed(x, diagonal) if ndim == 1 else ops.clone(ops.diagonal(x, diagonal))


@decomposition("diagflat", "x, offset=0")
def diagflat(ops: Any, x: Any, offset: int) -> Any:
    """A matrix with all elements on its diagonal."""
    return ops.diag_embed(ops.view(x, (-1,)), offset)


# -- samples -----------------------------------------------------------------------------------------------------------

sample("transpose", real("abc"), 0, 2)
sample("transpose", real("ab"), -1, 0)
sample("permute", real("abc"), (2, 0, 1))
sample("movedim", real("abc"), 0, 2)
sample("movedim", real("abc"), (0, 1), (2, 0))
sample("t reversed_dims", real("ab"))
sample("reversed_dims matrix_transpose", real("abc"))
sample("squeeze", real("a1b"), 1)
sample("squeeze", real("a1b1"))
sample("squeeze", real("ab"), 0)
sample("unsqueeze", real("ab"), 1)
sample("unsqueeze", real("ab"), -1)
sample("expand", real("a1c"), (5, size("a"), 2, size("c")))
sample("expand", real("ab"), (-1, -1))
sample("expand_as", real("a1"), real("ab").fixed)
sample("narrow", real(9, "b"), 0, 1, 7)
sample("narrow", real("ab"), 1, 0, size("b"))
sample("narrow", real("a", 9), 1, -4, 3)
sample("slice", real(9, "b"), 0, 1, 8, 2)
sample("slice", real("a", 9), 1, -3)
sample("slice", real("ab"), 1)
sample("select", real("abc"), 1, 0)
sample("select", real("abc"), 2, -1)
sample("diagonal", real("abc"), 0, 0, 2)
sample("diagonal", real("ab"), 1)
sample("diagonal", real("ab"), -1)
sample("unfold", real("a", 9), 1, 3, 2)
sample("unfold", real(9, "b"), 0, 2, 4)
sample("repeat", real("ab"), (2, 1))
sample("repeat", real("ab"), (3, 1, 2))
sample("tile", real("ab"), (2,))
sample("tile", real("ab"), (2, 1, 3))
sample("repeat_interleave", real("abc"), 2, 1)
sample("repeat_interleave", real("ab"), 3)
sample("repeat_interleave", real("ab"), 2, 0)
sample("transpose", booleans("ab"), 0, 1)
sample("permute", booleans("abc"), (2, 0, 1))
sample("movedim", booleans("abc"), 0, 2)
sample("t reversed_dims matrix_transpose", booleans("ab"))
sample("squeeze", booleans("a1b"), 1)
sample("unsqueeze", booleans("ab"), 1)
sample("expand", booleans("a1"), (size("a"), 4))
sample("narrow", booleans(9, "b"), 0, 1, 7)
sample("slice", booleans(9, "b"), 0, 1, 8, 2)
sample("select", booleans("ab"), 1, 0)
sample("diagonal", booleans("ab"))
sample("unfold", booleans("a", 9), 1, 3, 2)
sample("repeat", booleans("ab"), (2, 1))
sample("repeat_interleave", booleans("ab"), 2, 0)
sample("repeat_each", real("a4"), indices(3, "4"), 1)
sample("repeat_each", real("ab"), 2, 0)
sample("repeat_each", indices(3, "n"))
sample("roll", real("abc"), 1, 0)
sample("roll", real("ab"), (2, -1), (0, 1))
sample("roll", real("ab"), 2)
sample("flip", real("abc"), (0, 2))
sample("flip", real("ab"), (1,))
sample("tril triu", real("ab"))
sample("tril triu", real("abc"), 1)
sample("tril triu", real("abc"), -1)
sample("roll", booleans("ab"), 1, 0)
sample("flip", booleans("ab"), (1,))
sample("tril triu", booleans("ab"))
sample("rot90", real("ab"))
sample("rot90", real("abc"), -1, (2, 0))
sample("rot90", real("ab"), 2)
sample("diag_embed", real("ab"))
sample("diag_embed", real("ab"), -1, 0, 2)
sample("diag", real("n"), 1)
sample("diag", real("ab"), -1)
sample("diagflat", real("ab"), 1)

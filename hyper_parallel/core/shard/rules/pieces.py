"""Diagonals as matrices, storage by address, and writing into part of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.call import Operand
from hyper_parallel.core.shard.rule import R, Row, Rule, Strategies, decomposition, register_rule, replicated_row, rule
from hyper_parallel.core.shard.rules.dims import diagonal_length, keep_sums, normal_dim
from hyper_parallel.core.shard.sample import real, sample, shuffled, truth, whole
from hyper_parallel.core.shard.signature import Labels, broadcast_labels, labelled_rows
from hyper_parallel.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.shard.call import OpCall

# -- diagonals ---------------------------------------------------------------------------------------------------------


@rule("diag_embed", "x, offset=0, dim1=-2, dim2=-1")
def diag_embed(call: OpCall) -> Strategies:
    """The last dim, whole, becomes the diagonal of two new ones; the others pass."""
    x, offset = call["x"], call["offset"]
    if not x.ndim:
        msg = "x needs at least 1 dim"
        raise ValueError(msg)
    pair = [normal_dim(call[name], x.ndim + 1) for name in ("dim1", "dim2")]
    if pair[0] == pair[1]:
        msg = f"dim1 and dim2 are both {pair[0]}"
        raise ValueError(msg)
    rest = iter(range(x.ndim - 1))
    kept = [None if out in pair else next(rest) for out in range(x.ndim + 1)]
    side = x.shape[-1] + abs(offset)
    return Strategies(keep_sums(kept), (tuple(side if dim is None else x.shape[dim] for dim in kept),))


@decomposition("diag", "x, diagonal=0")
def diag(ops: Any, x: Any, diagonal: int) -> Any:
    """A matrix of a vector, or the diagonal of a matrix."""
    ndim = len(tuple(x.shape))
    if ndim not in (1, 2):
        msg = f"diag: x needs 1 or 2 dims, it has {ndim}"
        raise UnsupportedOperatorError(msg)
    return ops.diag_embed(x, diagonal) if ndim == 1 else ops.clone(ops.diagonal(x, diagonal))


@decomposition("diagflat", "x, offset=0")
def diagflat(ops: Any, x: Any, offset: int) -> Any:
    """A matrix with all elements on its diagonal."""
    return ops.diag_embed(ops.view(x, (-1,)), offset)


# -- storage -----------------------------------------------------------------------------------------------------------


def _addressed(call: OpCall, shape: Sequence[int]) -> Strategies:
    """Storage by address: only where every rank holds all of it as the single device does."""
    layout = call["x"].layout
    if any(layout.dim_axes) or layout.partials:
        msg = "strides address storage, of which ranks hold different pieces; x = x.redistribute().contiguous() first"
        raise ValueError(msg)
    return Strategies((replicated_row(len(call.operands)),), (tuple(shape),))


@rule("as_strided", "x, size, stride, storage_offset=None", view=True)
def as_strided(call: OpCall) -> Strategies:
    """A look at storage."""
    return _addressed(call, call["size"])


@rule("as_strided_scatter", "x, src, size, stride, storage_offset=None")
def as_strided_scatter(call: OpCall) -> Strategies:
    """A copy of which some storage is replaced."""
    return _addressed(call, call["x"].shape)


# -- part of a copy ----------------------------------------------------------------------------------------------------


def _replaced(call: OpCall, part: Sequence[int | None], shape: Sequence[int]) -> Strategies:
    """``x`` with ``src`` of ``shape`` in place of some of it; dim ``d`` of the part is dim ``part[d]`` of ``x``."""
    x, src = call["x"], call["src"]
    if tuple(src.shape) != tuple(shape):
        msg = f"src is {list(src.shape)}, the part that it replaces is {list(shape)}"
        raise ValueError(msg)
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    inner = tuple(None if dim is None else names[dim] for dim in part)
    whole = frozenset(names) - frozenset(inner)
    joint = (0, 1) if x.floating == src.floating else ()
    return Strategies(labelled_rows(Labels((names, inner), (names,), None, whole, joint=joint)), (x.shape,))


@rule("select_scatter", "x, src, dim, index")
def select_scatter(call: OpCall) -> Strategies:
    """One element of a whole dim is replaced."""
    x, index = call["x"], call["index"]
    dim = normal_dim(call["dim"], x.ndim)
    if not x.ndim or not -x.shape[dim] <= index < x.shape[dim]:
        msg = f"index {index} does not exist in dim {dim} of {list(x.shape)}"
        raise ValueError(msg)
    rest = [one for one in range(x.ndim) if one != dim]
    return _replaced(call, rest, [x.shape[one] for one in rest])


@rule("slice_scatter", "x, src, dim=0, start=None, end=None, step=1")
def slice_scatter(call: OpCall) -> Strategies:
    """Every ``step``-th element of a range of a whole dim is replaced."""
    x = call["x"]
    dim = normal_dim(call["dim"], x.ndim)
    length = len(range(*slice(call["start"], call["end"], call["step"]).indices(x.shape[dim])))
    part = [None if one == dim else one for one in range(x.ndim)]
    return _replaced(call, part, [length if one == dim else size for one, size in enumerate(x.shape)])


@rule("diagonal_scatter", "x, src, offset=0, dim1=0, dim2=1")
def diagonal_scatter(call: OpCall) -> Strategies:
    """The diagonal of two whole dims is replaced."""
    x = call["x"]
    pair = [normal_dim(call[name], x.ndim) for name in ("dim1", "dim2")]
    length = diagonal_length(x.shape, pair, call["offset"])
    rest = [one for one in range(x.ndim) if one not in pair]
    return _replaced(call, [*rest, None], [*(x.shape[one] for one in rest), length])


def _along(call: OpCall, part: str, *, joint: bool) -> Strategies:
    """``…k…, [i], …[i]… -> …k…``: rows of a whole dim are replaced."""
    x, index = call["x"], call["index"]
    dim = normal_dim(call["dim"], x.ndim)
    names = tuple("x" if one == dim else f"d{one}" for one in range(x.ndim))
    inputs: list[tuple[str | None, ...]] = [names, (None,) * index.ndim]
    source = call[part]
    if isinstance(source, Operand):
        if source.ndim == x.ndim and x.ndim:
            inputs.append(tuple(None if one == dim else name for one, name in enumerate(names)))
        else:
            inputs.append((None,) * source.ndim)
    linear = joint and isinstance(source, Operand) and source.floating == x.floating
    labels = Labels(tuple(inputs), (names,), None, frozenset({"x"}), joint=(0, 2) if linear else ())
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("index_copy", "x, dim, index, source")
def index_copy(call: OpCall) -> Strategies:
    """Rows of a whole dim are replaced."""
    _rows_fit(call)
    return _along(call, "source", joint=True)


def _rows_fit(call: OpCall) -> None:
    x, index, source = call["x"], call["index"], call["source"]
    dim = normal_dim(call["dim"], x.ndim)
    count = index.shape[0] if index.ndim else 1
    wanted = tuple(count if one == dim else size for one, size in enumerate(x.shape))
    if index.ndim > 1 or (source.shape != wanted and not (source.ndim == 0 and x.ndim <= 1 and count == 1)):
        msg = f"x {list(x.shape)}, index {list(index.shape)} and source {list(source.shape)} do not fit along dim {dim}"
        raise ValueError(msg)


@rule("index_reduce", "x, dim, index, source, reduce, *, include_self=True")
def index_reduce(call: OpCall) -> Strategies:
    """Rows of a whole dim are reduced with others."""
    _rows_fit(call)
    return _along(call, "source", joint=False)


@rule("index_fill", "x, dim, index, value")
def index_fill(call: OpCall) -> Strategies:
    """Rows of a whole dim are filled with a number; a number other than zero is a constant, and no sum."""
    found = _along(call, "value", joint=False)
    value = call["value"]
    if isinstance(value, Operand) or value != 0:
        return found
    rest = (R,) * (len(call.operands) - 1)
    pending = [row for row in keep_sums([]) if row.inputs[0].is_partial()]
    return Strategies((*found.rows, *(Row((*row.inputs, *rest), row.outputs) for row in pending)), found.outputs)


# -- by number, row by row ---------------------------------------------------------------------------------------------


@rule("take", "x, index")
def take(call: OpCall) -> Strategies:
    """Elements of the whole, numbered row by row, at indices of any layout."""
    x, index = call["x"], call["index"]
    names = tuple(f"i{dim}" for dim in range(index.ndim))
    return Strategies(labelled_rows(Labels(((None,) * x.ndim, names), (names,), each=(0,))), (index.shape,))


def _all_whole(call: OpCall) -> Strategies:
    """Everything is whole: what goes where is counted over all elements."""
    return Strategies((replicated_row(len(call.operands)),), (call["x"].shape,))


register_rule(Rule("put", "x, index, source, accumulate=False", _all_whole))


@rule("masked_scatter", "x, mask, source")
def masked_scatter(call: OpCall) -> Strategies:
    """Everything is whole: the source is used up in the order of all elements."""
    _, _, shape = broadcast_labels([call["x"].shape, call["mask"].shape])
    return Strategies((replicated_row(len(call.operands)),), (shape,))


# -- samples -----------------------------------------------------------------------------------------------------------

sample("diag_embed", real("ab"))
sample("diag_embed", real("ab"), -1, 0, 2)
sample("diag", real("n"), 1)
sample("diag", real("ab"), -1)
sample("diagflat", real("ab"), 1)
sample("as_strided", real("6"), (2, 3), (1, 2))
sample("as_strided_scatter", real("6"), real("22"), (2, 2), (1, 2))
sample("select_scatter", real("abc"), real("ac"), 1, 0)
sample("slice_scatter", real("a", 9), real("a", 4), 1, 0, 8, 2)
sample("slice_scatter", real("ab"), real("ab"))
sample("diagonal_scatter", real("a44"), real("a4"), 0, 1, 2)
sample("index_copy", real("a", 9), 1, shuffled(9, "3"), real("a3"))
sample("index_copy", real(6, "b"), 0, shuffled(6, "2"), real("2b"))
sample("index_fill", real("abc"), 1, whole("b", "i"), 0.5)
sample("index_fill", real("ab"), 0, whole("a", "i"), 0)
sample("index_reduce", real("ab"), 0, whole("a", "i"), real("ib"), "mean")
sample("index_reduce", real("ab"), 1, whole("b", "i"), real("ai"), "amax", include_self=False)
sample("take", real("ab"), whole("ab", "ij"))
sample("put", real("ab"), shuffled("ab", "1"), real("1"))
sample("put", real("ab"), whole("ab", "n"), real("n"), accumulate=True)
sample("masked_scatter", real("ab"), truth("ab"), real("ab"))

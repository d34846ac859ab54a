"""Writes by index, in place or into a copy: dims that the index does not touch may be sharded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.labels import Labels, broadcast_labels, labelled_rows
from hyper_parallel.core.shard.rule import (
    OpCall,
    Operand,
    R,
    Row,
    Rule,
    Strategies,
    register_rule,
    replicated_row,
    rule,
)
from hyper_parallel.core.shard.rules.dims import diagonal_length, keep_dims_linear, normalize_dim
from hyper_parallel.core.shard.rules.index import IndexResult, parse_index, shared_dims, unshared_dims
from hyper_parallel.core.shard.rules.view import addressed
from hyper_parallel.core.shard.sample import Sample, booleans, indices, real, sample, sample_call, shuffled

if TYPE_CHECKING:
    from collections.abc import Sequence


@rule("setitem", "x, index, value")
def setitem(call: OpCall) -> Strategies:
    """Dims that the index does not touch may be sharded, in the same way in ``x`` and ``value``, which broadcasts."""
    x, value = call["x"], call["value"]
    picked = parse_index(x, call["index"])
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    inputs: list[tuple[str | None, ...]] = [names, *([(None,) * len(dims) for dims in picked.indices])]
    joint: tuple[int, ...] = ()
    if isinstance(value, Operand):
        inputs.append(_value_dims(value, picked))
        if value.floating == x.floating:
            joint = (0, len(inputs) - 1)
    labels = Labels(tuple(inputs), (names,), whole=frozenset(names[dim] for dim in picked.touched), joint=joint)
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("index_put", "x, indices, values, accumulate=False")
def index_put(call: OpCall) -> Strategies:
    """``setitem`` into a copy; Partial(sum) passes if both ``x`` and ``values`` are Partial."""
    x, values = call["x"], call["values"]
    picked = parse_index(x, tuple(slice(None) if item is None else item for item in call["indices"]))
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    inputs = (names, *((None,) * len(dims) for dims in picked.indices), _value_dims(values, picked))
    joint = (0, len(inputs) - 1) if values.floating == x.floating else ()
    labels = Labels(inputs, (names,), None, frozenset(names[dim] for dim in picked.touched), joint=joint)
    return Strategies(labelled_rows(labels), (x.shape,))


def _value_dims(value: Operand, picked: IndexResult) -> tuple[str | None, ...]:
    shape = list(value.shape)
    extra = max(len(shape) - len(picked.shape), 0)
    missing = max(len(picked.shape) - len(shape), 0)
    tail = picked.shape[missing:]
    if any(size != 1 for size in shape[:extra]) or any(
        size not in (1, wanted) for size, wanted in zip(shape[extra:], tail, strict=True)
    ):
        msg = f"value {shape} does not broadcast to {list(picked.shape)}"
        raise ValueError(msg)
    kept = [
        name if size == wanted and name is not None and name.startswith("d") else None
        for size, wanted, name in zip(shape[extra:], tail, picked.dims[missing:], strict=True)
    ]
    return (*(None,) * extra, *kept)


def _scattered(call: OpCall, source: Any, *, adds: bool, linear: bool = True) -> Strategies:
    x, index = call["x"], call["index"]
    dim = normalize_dim(call["dim"], x.ndim)
    tensors = [x, index, source] if isinstance(source, Operand) else [x, index]
    if 0 in index.shape or (
        max(operand.ndim for operand in tensors) <= 1 and not all(operand.ndim for operand in tensors)
    ):
        return Strategies((replicated_row(len(tensors)),), (x.shape,))
    if any(operand.ndim != x.ndim for operand in tensors):
        msg = (
            f"{', '.join(f'{operand.name} has {operand.ndim} dims' for operand in tensors)}; they must have the same "
            "number of dims"
        )
        raise ValueError(msg)
    shapes = [operand.shape for operand in tensors]
    whole = unshared_dims(shapes, dim, "x")
    # A source longer than the index is read only up to the index' length.
    aligned = adds and len(tensors) == 3 and index.shape[dim : dim + 1] == source.shape[dim : dim + 1]
    owns = ("x", "i", "i" if aligned else "s")
    inputs = tuple(shared_dims(shape, shapes, dim, own) for shape, own in zip(shapes, owns, strict=False))
    if not aligned:
        whole |= {"i", "s"}
    joint = (0, 2) if linear and len(tensors) == 3 and source.floating == x.floating else ()
    labels = Labels(
        inputs, (inputs[0],), whole=frozenset(whole), joint=joint, joins=(0,) if aligned else (), reduce="sum"
    )
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("scatter", "x, dim, index, src=None, *, value=None, reduce=None")
def scatter(call: OpCall) -> Strategies:
    """Dims other than ``dim`` may be sharded; linear in ``x`` and ``src`` unless ``reduce`` is given."""
    source = call["value"] if call["src"] is None else call["src"]
    return _scattered(call, source, adds=False, linear=call["reduce"] is None)


@rule("scatter_reduce", "x, dim, index, src, reduce, *, include_self=True")
def scatter_reduce(call: OpCall) -> Strategies:
    """``scatter`` that reduces all values written to one index; ``dim`` must not be sharded."""
    return _scattered(call, call["src"], adds=False, linear=False)


@rule("scatter_add", "x, dim, index, src")
def scatter_add(call: OpCall) -> Strategies:
    """``src`` sharded along ``dim`` leaves Partial(sum), to which ``x`` is added once; other dims may be sharded."""
    return _scattered(call, call["src"], adds=True)


@rule("index_add", "x, dim, index, source, *, alpha=1", by_value=True)
def index_add(call: OpCall) -> Strategies:
    """``…[k]…, i, …i… -> …[k]…``: a sharded ``i`` leaves Partial(sum), to which ``x`` is added once."""
    x, source, index = call["x"], call["source"], call["index"]
    dim = normalize_dim(call["dim"], x.ndim)
    if not x.ndim and math.prod(source.shape) == math.prod(index.shape) == 1:
        return Strategies((replicated_row(3),), ((),))
    rests = [operand.shape[:dim] + operand.shape[dim + 1 :] for operand in (x, source)]
    if not x.ndim or index.ndim != 1 or rests[0] != rests[1] or source.shape[dim] != index.shape[0]:
        msg = (
            f"x {list(x.shape)}, index {list(index.shape)} and source {list(source.shape)} do not match along dim {dim}"
        )
        raise ValueError(msg)
    names = [tuple(own if d == dim else f"d{d}" for d in range(x.ndim)) for own in "xi"]
    labels = Labels((names[0], ("i",), names[1]), (names[0],), whole=frozenset({"x"}), joint=(0, 2), joins=(0,))
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("as_strided_scatter", "x, src, size, stride, storage_offset=None")
def as_strided_scatter(call: OpCall) -> Strategies:
    """A copy with part of its storage replaced; every operand must be replicated."""
    return addressed(call, call["x"].shape)


# -- part of a copy ----------------------------------------------------------------------------------------------------


def _replaced(call: OpCall, part: Sequence[int | None], shape: Sequence[int]) -> Strategies:
    """Strategies of ``x`` with a slice replaced by ``src``; dim ``d`` of the slice is dim ``part[d]`` of ``x``."""
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
    """One element of ``dim`` is replaced; ``dim`` must not be sharded, the others may be sharded."""
    x, index = call["x"], call["index"]
    dim = normalize_dim(call["dim"], x.ndim)
    if not x.ndim or not -x.shape[dim] <= index < x.shape[dim]:
        msg = f"index {index} does not exist in dim {dim} of {list(x.shape)}"
        raise ValueError(msg)
    rest = [d for d in range(x.ndim) if d != dim]
    return _replaced(call, rest, [x.shape[d] for d in rest])


@rule("slice_scatter", "x, src, dim=0, start=None, end=None, step=1")
def slice_scatter(call: OpCall) -> Strategies:
    """Every ``step``-th element of a range of ``dim`` is replaced; ``dim`` must not be sharded."""
    x = call["x"]
    dim = normalize_dim(call["dim"], x.ndim)
    length = len(range(*slice(call["start"], call["end"], call["step"]).indices(x.shape[dim])))
    part = [None if d == dim else d for d in range(x.ndim)]
    return _replaced(call, part, [length if d == dim else size for d, size in enumerate(x.shape)])


@rule("diagonal_scatter", "x, src, offset=0, dim1=0, dim2=1")
def diagonal_scatter(call: OpCall) -> Strategies:
    """The diagonal of two dims is replaced; neither may be sharded."""
    x = call["x"]
    pair = [normalize_dim(call[name], x.ndim) for name in ("dim1", "dim2")]
    length = diagonal_length(x.shape, pair, call["offset"])
    rest = [d for d in range(x.ndim) if d not in pair]
    return _replaced(call, [*rest, None], [*(x.shape[d] for d in rest), length])


def _along(call: OpCall, part: str, *, joint: bool) -> Strategies:
    """Strategies of ``…[k]…, [i], …[i]… -> …[k]…``, where slices along ``dim`` are replaced."""
    x, index = call["x"], call["index"]
    dim = normalize_dim(call["dim"], x.ndim)
    names = tuple("x" if d == dim else f"d{d}" for d in range(x.ndim))
    inputs: list[tuple[str | None, ...]] = [names, (None,) * index.ndim]
    source = call[part]
    if isinstance(source, Operand):
        if source.ndim == x.ndim and x.ndim:
            inputs.append(tuple(None if d == dim else name for d, name in enumerate(names)))
        else:
            inputs.append((None,) * source.ndim)
    linear = joint and isinstance(source, Operand) and source.floating == x.floating
    labels = Labels(tuple(inputs), (names,), None, frozenset({"x"}), joint=(0, 2) if linear else ())
    return Strategies(labelled_rows(labels), (x.shape,))


@rule("index_copy", "x, dim, index, source")
def index_copy(call: OpCall) -> Strategies:
    """Slices along ``dim`` are replaced; ``dim`` must not be sharded, the others may be sharded."""
    _check_index_source(call)
    return _along(call, "source", joint=True)


def _check_index_source(call: OpCall) -> None:
    x, index, source = call["x"], call["index"], call["source"]
    dim = normalize_dim(call["dim"], x.ndim)
    count = index.shape[0] if index.ndim else 1
    wanted = tuple(count if d == dim else size for d, size in enumerate(x.shape))
    if index.ndim > 1 or (source.shape != wanted and not (source.ndim == 0 and x.ndim <= 1 and count == 1)):
        msg = (
            f"x {list(x.shape)}, index {list(index.shape)} and source {list(source.shape)} do not match along dim {dim}"
        )
        raise ValueError(msg)


@rule("index_reduce", "x, dim, index, source, reduce, *, include_self=True")
def index_reduce(call: OpCall) -> Strategies:
    """Slices along ``dim`` are reduced with those of ``source``; ``dim`` must not be sharded."""
    _check_index_source(call)
    return _along(call, "source", joint=False)


@rule("index_fill", "x, dim, index, value")
def index_fill(call: OpCall) -> Strategies:
    """Slices along ``dim``, which must not be sharded, are filled; Partial passes only if the value is zero."""
    replaced = _along(call, "value", joint=False)
    value = call["value"]
    if isinstance(value, Operand) or value != 0:
        return replaced
    rest = (R,) * (len(call.operands) - 1)
    partial_rows = [row for row in keep_dims_linear([]) if row.inputs[0].is_partial()]
    return Strategies(
        (*replaced.rows, *(Row((*row.inputs, *rest), row.outputs) for row in partial_rows)), replaced.outputs
    )


def _all_replicated(call: OpCall) -> Strategies:
    """Strategies of an operator that addresses elements of flattened tensors: every operand must be replicated."""
    return Strategies((replicated_row(len(call.operands)),), (call["x"].shape,))


register_rule(Rule("put", "x, index, source, accumulate=False", _all_replicated))


@rule("masked_scatter", "x, mask, source")
def masked_scatter(call: OpCall) -> Strategies:
    """Elements of ``source`` are assigned, in order, to True elements, so every operand must be replicated."""
    _, _, shape = broadcast_labels([call["x"].shape, call["mask"].shape])
    return Strategies((replicated_row(len(call.operands)),), (shape,))


# -- samples -----------------------------------------------------------------------------------------------------------

sample_call("setitem", Sample((real(4, "bc"), (slice(1, 3),), real("c")), writes=True))
sample_call("setitem", Sample((real(4, "bc"), (slice(1, 3),), real(2, "bc")), writes=True))
sample_call("setitem", Sample((real("ab"), (slice(None), 0), 1.5), writes=True))
sample_call("setitem", Sample((real("abc"), (0,), real("b1")), writes=True))
sample_call("setitem", Sample((real("abc"), (shuffled("a", 1),), real("bc")), writes=True))
sample("index_put", real("ab"), (shuffled("a", "1"),), real("1b"))
sample("index_put", real("ab"), (None, indices("b", "i")), real("ai"), accumulate=True)
sample("scatter", real(9, "b"), 0, shuffled(9, 4, "b"), real(4, "b"))
sample("scatter", real("a", 9), 1, shuffled(9, "a", 4, dim=1), real("a", 4))
sample("scatter", real("a", 9), 1, shuffled(9, "a", 4, dim=1), 1.5)
sample("scatter_add", real("ab"), 0, indices("a", "ib"), real("ib"))
sample("scatter_add", real("ab"), 1, indices("b", "ai"), real("ai"))
sample("scatter_add", real("a", 6), 0, indices("a", "i", 4), real("i", 5).fixed)
sample("index_add", real("abc"), 0, indices("a", "i"), real("ibc"))
sample("index_add", real("ab"), 1, indices("b", "i"), real("ai"), alpha=2)
sample("scatter_reduce", real("ab"), 1, indices("b", "ai"), real("ai"), "sum")
sample("scatter_reduce", real("ab"), 0, indices("a", "ib"), real("ib"), "mean", include_self=False)
sample("scatter_reduce", real("ab"), 0, indices("a", "ib"), real("ib"), "amax")
sample("scatter", real("ab").fixed, 0, indices("a", "ib"), real("ib").fixed, reduce="add")
sample("scatter", real("a", 9), 1, shuffled(9, "a", 4, dim=1), value=1.5)
sample("as_strided_scatter", real("6"), real("22"), (2, 2), (1, 2))
sample("select_scatter", real("abc"), real("ac"), 1, 0)
sample("slice_scatter", real("a", 9), real("a", 4), 1, 0, 8, 2)
sample("slice_scatter", real("ab"), real("ab"))
sample("diagonal_scatter", real("a44"), real("a4"), 0, 1, 2)
sample("index_copy", real("a", 9), 1, shuffled(9, "3"), real("a3"))
sample("index_copy", real(6, "b"), 0, shuffled(6, "2"), real("2b"))
sample("index_fill", real("abc"), 1, indices("b", "i"), 0.5)
sample("index_fill", real("ab"), 0, indices("a", "i"), 0)
sample("index_reduce", real("ab"), 0, indices("a", "i"), real("ib"), "mean")
sample("index_reduce", real("ab"), 1, indices("b", "i"), real("ai"), "amax", include_self=False)
sample("put", real("ab"), shuffled("ab", "1"), real("1"))
sample("put", real("ab"), indices("ab", "n"), real("n"), accumulate=True)
sample("masked_scatter", real("ab"), booleans("ab"), real("ab"))

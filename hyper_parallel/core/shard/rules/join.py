"""Joining tensors, and moving or masking elements along dims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.call import LocalCall
from hyper_parallel.core.shard.rule import Strategies, decomposition, rule
from hyper_parallel.core.shard.rules.dims import keep_dims, normal_dim
from hyper_parallel.core.shard.sample import real, sample, truth
from hyper_parallel.core.shard.signature import Labels, labelled_rows
from hyper_parallel.errors import short_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.shard.call import OpCall, Operand


def _ordered(tensors: Sequence[Operand]) -> tuple[str, ...]:
    """Extrema that may stay pending: none where a complex operand makes the result complex, which has no order."""
    mixed = any(one.dtype is not None and short_dtype(one.dtype).startswith("c") for one in tensors)
    return () if mixed else ("max", "min")


@rule("cat", "tensors, dim=0", by_dtype=True)
def cat(call: OpCall) -> Strategies:
    """The joined dim is whole; the others run together, and so do pending reductions."""
    tensors = call["tensors"]
    full = [one for one in tensors if one.shape != (0,)] or list(tensors)
    shapes = [one.shape for one in full]
    dim = normal_dim(call["dim"], len(shapes[0]))
    rests = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(rests) > 1 or not shapes[0]:
        msg = f"shapes {', '.join(str(list(shape)) for shape in shapes)} differ outside dim {dim}"
        raise ValueError(msg)
    names = tuple(f"d{one}" for one in range(len(shapes[0])))
    inputs = tuple(names if one in full else (None,) for one in tensors)
    out = list(shapes[0])
    out[dim] = sum(shape[dim] for shape in shapes)
    everything = tuple(range(len(tensors)))
    labels = Labels(inputs, (names,), whole=frozenset({names[dim]}), joint=everything, monotone=_ordered(tensors))
    return Strategies(labelled_rows(labels), (tuple(out),))


@rule("stack", "tensors, dim=0", by_dtype=True)
def stack(call: OpCall) -> Strategies:
    """A new dim; the others run together, and so do pending reductions."""
    tensors = call["tensors"]
    shape = tensors[0].shape
    if any(one.shape != shape for one in tensors):
        msg = f"shapes {', '.join(str(list(one.shape)) for one in tensors)} differ"
        raise ValueError(msg)
    dim = normal_dim(call["dim"], len(shape) + 1)
    names = tuple(f"d{one}" for one in range(len(shape)))
    everything = tuple(range(len(tensors)))
    out = (*names[:dim], None, *names[dim:])
    labels = Labels((names,) * len(tensors), (out,), joint=everything, monotone=_ordered(tensors))
    return Strategies(labelled_rows(labels), ((*shape[:dim], len(tensors), *shape[dim:]),))


@decomposition("hstack", "tensors")
def hstack(ops: Any, tensors: Any) -> Any:
    """Joined along dim 1, or dim 0 of vectors."""
    full = [ops.view(one, (1,)) if not tuple(one.shape) else one for one in tensors]
    return ops.cat(full, 0 if len(tuple(full[0].shape)) == 1 else 1)


@decomposition("vstack", "tensors")
def vstack(ops: Any, tensors: Any) -> Any:
    """Joined along dim 0, a vector being one row."""
    rows = [ops.view(one, (1, -1)) if len(tuple(one.shape)) < 2 else one for one in tensors]
    return ops.cat(rows, 0)


def _moved(call: OpCall, dims: Any) -> Strategies:
    x = call["x"]
    moved = {normal_dim(dim, x.ndim) for dim in ((dims,) if isinstance(dims, int) else dims)}
    return Strategies(keep_dims([None if dim in moved else dim for dim in range(x.ndim)]), (x.shape,))


@rule("roll", "x, shifts, dims=None")
def roll(call: OpCall) -> Strategies:
    """A rolled dim is whole; without dims all of them are."""
    dims = call["dims"]
    flat = dims is None or (isinstance(dims, (list, tuple)) and not dims)
    return _moved(call, range(call["x"].ndim) if flat else dims)


@rule("flip", "x, *dims")
def flip(call: OpCall) -> Strategies:
    """A flipped dim is whole."""
    return _moved(call, call["dims"])


@decomposition("rot90", "x, k=1, dims=(0, 1)")
def rot90(ops: Any, x: Any, k: int, dims: Any) -> Any:
    """Quarter turns in the plane of two dims: one is reversed, and both change places."""
    first, second = dims
    if k % 2:
        return ops.clone(ops.transpose(ops.flip(x, (first if k % 4 == 3 else second,)), first, second))
    return ops.flip(x, (first, second)) if k % 4 else ops.clone(x)


def _triangle(call: OpCall) -> Strategies:
    """All dims may be sharded: the local call shifts the diagonal by where its piece starts."""
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


@decomposition("glu", "x, dim=-1")
def glu(ops: Any, x: Any, dim: int) -> Any:
    """One half gated by the other."""
    size = tuple(x.shape)[dim]
    if size % 2:
        msg = f"glu: dim {dim} of size {size} has no halves"
        raise ValueError(msg)
    half = size // 2
    value, gate = ops.split(x, [half, half], dim)
    return ops.mul(value, ops.sigmoid(gate))


sample("cat", (real("ab"), real("cb")), 0)
sample("cat", (real("ab"), real("ac"), real("a1")), 1)
sample("cat", (real("ab"), real(0)), 0)
sample("stack", (real("ab"), real("ab")), 1)
sample("stack", (real("ab"), real("ab"), real("ab")))
sample("hstack", (real("ab"), real("ac")))
sample("hstack", (real("a"), real("b")))
sample("vstack", (real("ab"), real("b")))
sample("roll", real("abc"), 1, 0)
sample("roll", real("ab"), (2, -1), (0, 1))
sample("roll", real("ab"), 2)
sample("flip", real("abc"), (0, 2))
sample("flip", real("ab"), (1,))
sample("tril triu", real("ab"))
sample("tril triu", real("abc"), 1)
sample("tril triu", real("abc"), -1)
sample("glu", real("a", 6))
sample("glu", real(6, "b"), 0)
sample("roll", truth("ab"), 1, 0)
sample("flip", truth("ab"), (1,))
sample("tril triu", truth("ab"))
sample("rot90", real("ab"))
sample("rot90", real("abc"), -1, (2, 0))
sample("rot90", real("ab"), 2)

"""Views by shape and by storage, concatenation and splits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Placement, Shard
from hyper_parallel.core.shard.labels import Labels, labelled_rows
from hyper_parallel.core.shard.rule import (
    LocalCall,
    OpCall,
    Operand,
    Row,
    Strategies,
    decomposition,
    replicated_row,
    rule,
)
from hyper_parallel.core.shard.rules.dims import keep_dims, normalize_dim, passing_rows
from hyper_parallel.core.shard.sample import booleans, complex_, real, sample, size
from hyper_parallel.errors import short_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["addressed", "view_groups"]


@rule("view", "x, *shape", view=True)
def view(call: OpCall) -> Strategies:
    """The first dim of a group of merged or split dims may be sharded if every shard has complete rows of the group."""
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
    """Minimal groups of adjacent source and target dims with the same elements; dims of size 1 are in no group."""
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
    # A shard of the first source dim must be a shard of the first target dim, so the axis must divide both.
    return Row((Shard(first),), (Shard(lead),), even=((0, first),), sizes=((0, first, target[lead]),))


def _merging_rows(source: Sequence[int], ins: list[int], lead: int) -> Iterator[Row]:
    # An inner dim may be sharded if the mesh axes before this one split every dim before it into single rows.
    for position in range(1, len(ins)):
        before = tuple((0, dim, source[dim]) for dim in ins[:position])
        yield Row((Shard(ins[position]),), (Shard(lead),), even=((0, ins[position]),), cut=before)


def _splitting_rows(first: int, target: Sequence[int], outs: list[int]) -> Iterator[Row]:
    done = 1
    for position in range(1, len(outs)):
        done *= target[outs[position - 1]]
        # The axes before this one shard exactly the dims before; this axis must divide the next dim.
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
    """``… -> …[2]``, linear: the new dim (real and imaginary part) is not sharded, the others may be sharded."""
    x = call["x"]
    names = tuple(f"d{dim}" for dim in range(x.ndim))
    labels = Labels((names,), ((*names, None),), None, joint=(0,))
    return Strategies(_filled(labels), ((*x.shape, PAIR),))


@rule("view_as_complex", "x", view=True)
def view_as_complex(call: OpCall) -> Strategies:
    """``…[2] -> …``, linear: the last dim (real and imaginary part) must not be sharded, the others may be sharded."""
    x = call["x"]
    if x.shape[-1:] != (PAIR,):
        msg = f"the last dim must hold real and imaginary part, but x is {list(x.shape)}"
        raise ValueError(msg)
    names = tuple(f"d{dim}" for dim in range(x.ndim - 1))
    labels = Labels(((*names, None),), (names,), None, joint=(0,))
    return Strategies(_filled(labels), (x.shape[:-1],))


def _filled(labels: Labels) -> tuple[Row, ...]:
    """Rows without empty shards, because PyTorch's stride checks refuse those in forward and backward."""
    dims: dict[Placement, int] = {Shard(dim): dim for dim in range(len(labels.inputs[0]))}
    return tuple(
        replace(row, full=((0, dims[row.inputs[0]]),)) if row.inputs[0] in dims else row
        for row in labelled_rows(labels)
    )


# -- storage -----------------------------------------------------------------------------------------------------------


def addressed(call: OpCall, shape: Sequence[int]) -> Strategies:
    """Strategies of an operator that addresses storage by strides: ``x`` must be replicated."""
    layout = call["x"].layout
    if any(layout.dim_axes) or layout.partials:
        msg = "strides address storage, of which ranks have different shards; x = x.redistribute().contiguous() first"
        raise ValueError(msg)
    return Strategies((replicated_row(len(call.operands)),), (tuple(shape),))


@rule("as_strided", "x, size, stride, storage_offset=None", view=True)
def as_strided(call: OpCall) -> Strategies:
    """A view of storage by sizes and strides; ``x`` must be replicated."""
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


@rule("unbind", "x, dim=0", view=True)
def unbind(call: OpCall) -> Strategies:
    """``dim`` is removed and must not be sharded; the other dims may be sharded."""
    x = call["x"]
    dim = normalize_dim(call["dim"], x.ndim)
    kept = [d for d in range(x.ndim) if d != dim]
    count = x.shape[dim]
    if not count:
        msg = f"dim {dim} of {list(x.shape)} is empty, so it cannot be unbound"
        raise ValueError(msg)
    return Strategies(keep_dims(kept, count), (tuple(x.shape[d] for d in kept),) * count, many=True)


def _split_strategies(call: OpCall, dim: int, lengths: Sequence[int], **arguments: Any) -> Strategies:
    """Strategies of parts of ``lengths``, for which the local call gets ``arguments``; a single part is not split."""
    x = call["x"]
    kept = [d if d != dim or len(lengths) == 1 else None for d in range(x.ndim)]
    shapes = tuple((*x.shape[:dim], length, *x.shape[dim + 1 :]) for length in lengths)

    def unsplit(platform: Any, args: dict[str, Any]) -> tuple[Any]:
        return (platform.narrow(args["x"], dim, 0, args["x"].shape[dim]),)  # keeps the strides, as split does

    def local(*_: Any) -> LocalCall | None:
        return LocalCall(run=unsplit) if len(lengths) == 1 else LocalCall(arguments) if arguments else None

    return Strategies(keep_dims(kept, len(lengths)), shapes, local, many=True)


@rule("split", "x, split_size_or_sections, dim=0", view=True)
def split(call: OpCall) -> Strategies:
    """``dim`` is split and must not be sharded; the other dims may be sharded."""
    x, wanted = call["x"], call["split_size_or_sections"]
    dim = normalize_dim(call["dim"], x.ndim)
    size = x.shape[dim]
    if isinstance(wanted, int):
        if wanted < 0 or (wanted == 0 and size):
            msg = f"split size {wanted} is not positive"
            raise ValueError(msg)
        lengths = [min(wanted, size - start) for start in range(0, size, max(wanted, 1))] or [0]
    else:
        lengths = list(wanted)
        if sum(lengths) != size or any(length < 0 for length in lengths):
            msg = f"sections {lengths} do not add up to dim {dim} of size {size}"
            raise ValueError(msg)
    return _split_strategies(call, dim, lengths, split_size_or_sections=list(lengths))


@rule("chunk", "x, chunks, dim=0", view=True)
def chunk(call: OpCall) -> Strategies:
    """Parts of size ``ceil(size / chunks)`` along ``dim``, which must not be sharded; the others may be sharded."""
    x, chunks = call["x"], call["chunks"]
    dim = normalize_dim(call["dim"], x.ndim)
    size = x.shape[dim]
    if chunks < 1:
        msg = f"chunks must be positive, got {chunks}"
        raise ValueError(msg)
    length = -(-size // chunks)
    lengths = [min(length, size - start) for start in range(0, size, length)] if size else [0] * chunks
    return _split_strategies(call, dim, lengths)


@decomposition("tensor_split", "x, indices_or_sections, dim=0")
def tensor_split(ops: Any, x: Any, indices_or_sections: Any, dim: int) -> Any:
    """Split ``dim`` at the given indices, or into a number of parts whose sizes differ by at most one."""
    size, wanted = tuple(x.shape)[dim], indices_or_sections
    if ops.platform.is_tensor(wanted):
        wanted = wanted.tolist()
    if isinstance(wanted, int):
        if wanted < 1:
            msg = f"tensor_split: the number of sections must be positive, got {wanted}"
            raise ValueError(msg)
        base, more = divmod(size, wanted)
        starts = [position * base + min(position, more) for position in range(wanted + 1)]
        return tuple(ops.narrow(x, dim, start, end - start) for start, end in pairwise(starts))
    if not isinstance(wanted, (list, tuple)):
        msg = "tensor_split: indices must be a list of numbers, or a tensor of them"
        raise TypeError(msg)
    ends = [slice(None, index).indices(size)[1] for index in wanted]
    starts = [0, *ends]
    return tuple(
        ops.narrow(x, dim, start, max(end - start, 0)) for start, end in zip(starts, [*ends, size], strict=True)
    )


def _order_reductions(tensors: Sequence[Operand]) -> tuple[str, ...]:
    """Extrema that may stay partial: none for complex operands, because complex numbers have no order."""
    mixed = any(operand.dtype is not None and short_dtype(operand.dtype).startswith("c") for operand in tensors)
    return () if mixed else ("max", "min")


@rule("cat", "tensors, dim=0", by_dtype="partial")
def cat(call: OpCall) -> Strategies:
    """``dim`` must not be sharded; other dims are sharded alike in all operands. Partial passes if all are Partial."""
    tensors = call["tensors"]
    full = [operand for operand in tensors if operand.shape != (0,)] or list(tensors)
    shapes = [operand.shape for operand in full]
    dim = normalize_dim(call["dim"], len(shapes[0]))
    rests = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(rests) > 1 or not shapes[0]:
        msg = f"shapes {', '.join(str(list(shape)) for shape in shapes)} differ outside dim {dim}"
        raise ValueError(msg)
    names = tuple(f"d{d}" for d in range(len(shapes[0])))
    inputs = tuple(names if operand in full else (None,) for operand in tensors)
    out = list(shapes[0])
    out[dim] = sum(shape[dim] for shape in shapes)
    all_operands = tuple(range(len(tensors)))
    labels = Labels(
        inputs, (names,), whole=frozenset({names[dim]}), joint=all_operands, monotone=_order_reductions(tensors)
    )
    return Strategies(labelled_rows(labels), (tuple(out),))


@rule("stack", "tensors, dim=0", by_dtype="partial")
def stack(call: OpCall) -> Strategies:
    """All dims are sharded alike in all operands, except the new one. Partial passes if all are Partial."""
    tensors = call["tensors"]
    shape = tensors[0].shape
    if any(operand.shape != shape for operand in tensors):
        msg = f"shapes {', '.join(str(list(operand.shape)) for operand in tensors)} differ"
        raise ValueError(msg)
    dim = normalize_dim(call["dim"], len(shape) + 1)
    names = tuple(f"d{d}" for d in range(len(shape)))
    all_operands = tuple(range(len(tensors)))
    out = (*names[:dim], None, *names[dim:])
    labels = Labels((names,) * len(tensors), (out,), joint=all_operands, monotone=_order_reductions(tensors))
    return Strategies(labelled_rows(labels), ((*shape[:dim], len(tensors), *shape[dim:]),))


@decomposition("hstack", "tensors")
def hstack(ops: Any, tensors: Any) -> Any:
    """``cat`` along dim 1, or along dim 0 of vectors."""
    full = [ops.view(tensor, (1,)) if not tuple(tensor.shape) else tensor for tensor in tensors]
    return ops.cat(full, 0 if len(tuple(full[0].shape)) == 1 else 1)


@decomposition("vstack", "tensors")
def vstack(ops: Any, tensors: Any) -> Any:
    """``cat`` along dim 0; a vector is one row."""
    rows = [ops.view(tensor, (1, -1)) if len(tuple(tensor.shape)) < 2 else tensor for tensor in tensors]
    return ops.cat(rows, 0)


# -- samples -----------------------------------------------------------------------------------------------------------

sample("unbind", real("abc"), 1)
sample("unbind", real("ab"))
sample("split", real("ab"), 2, 0)
sample("split", real("a", 9), (2, 3, 4), 1)
sample("split", real("ab"), size("b"), 1)
sample("chunk", real("ab"), 2)
sample("chunk", real("a", 9), 4, 1)
sample("tensor_split", real(9, "b"), 4)
sample("tensor_split", real("a", 9), (2, 5), 1)
sample("unbind", booleans("ab"))
sample("split", booleans("ab"), 2, 0)
sample("cat", (real("ab"), real("cb")), 0)
sample("cat", (real("ab"), real("ac"), real("a1")), 1)
sample("cat", (real("ab"), real(0)), 0)
sample("stack", (real("ab"), real("ab")), 1)
sample("stack", (real("ab"), real("ab"), real("ab")))
sample("hstack", (real("ab"), real("ac")))
sample("hstack", (real("a"), real("b")))
sample("vstack", (real("ab"), real("b")))

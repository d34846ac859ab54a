"""Joining tensors and splitting a tensor: every dim but the one that is joined or split may be sharded."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.labels import Labels, labelled_rows
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Operand, Strategies, decomposition, rule
from hyper_parallel.core.shard.rules.dims import keep_dims, normalize_dim
from hyper_parallel.core.shard.sample import booleans, real, sample, size
from hyper_parallel.errors import short_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence


@rule("unbind", "x, dim=0", view=True)
def unbind(call: OpCall) -> Strategies:
    """``dim`` is removed and must be whole; the other dims may be sharded."""
    x = call["x"]
    dim = normalize_dim(call["dim"], x.ndim)
    kept = [d for d in range(x.ndim) if d != dim]
    count = x.shape[dim]
    if not count:
        msg = f"dim {dim} of {list(x.shape)} is empty, so it cannot be unbound"
        raise ValueError(msg)
    return Strategies(keep_dims(kept, count), (tuple(x.shape[d] for d in kept),) * count, many=True)


def _split_strategies(call: OpCall, dim: int, lengths: Sequence[int], **arguments: Any) -> Strategies:
    """The strategies of parts of ``lengths``, for which the local call gets ``arguments``; one part is not split."""
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
    """``dim`` is split and must be whole; the other dims may be sharded."""
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
    """Parts of ``ceil(size / chunks)`` of ``dim``, which must be whole; the other dims may be sharded."""
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
    """Parts between the given indices, or a number of parts whose sizes differ by at most one."""
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
    """Extrema that may stay partial: none if an operand is complex, because complex numbers have no order."""
    mixed = any(operand.dtype is not None and short_dtype(operand.dtype).startswith("c") for operand in tensors)
    return () if mixed else ("max", "min")


@rule("cat", "tensors, dim=0", by_dtype="partial")
def cat(call: OpCall) -> Strategies:
    """``dim`` must be whole; the others are sharded alike in all operands, and Partial passes if all are Partial."""
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
    """All dims are sharded alike in all operands, the new one is whole; Partial passes if all are Partial."""
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

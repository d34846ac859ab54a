"""Normalisation over trailing dims, over groups of channels, or over the batch dim (which may be sharded)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.labels import Labels, labelled_rows, nonempty_row, nonempty_rows
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Row, Strategies, decomposition, rule
from hyper_parallel.core.shard.rules.loss import reduce_partials
from hyper_parallel.core.shard.sample import between, real, sample, size
from hyper_parallel.errors import short_dtype

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["unbiased"]


def _last_dims_strategies(call: OpCall) -> tuple[Strategies, tuple[str, ...]]:
    x, sizes = call["x"], call["normalized_shape"]
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if tuple(x.shape[x.ndim - len(sizes) :]) != sizes:
        msg = f"normalized_shape {list(sizes)} is not the end of x's shape {list(x.shape)}"
        raise ValueError(msg)
    for operand in call.operands[1:]:
        if operand.shape != sizes:
            msg = f"{operand.name} has shape {list(operand.shape)}, normalized_shape is {list(sizes)}"
            raise ValueError(msg)
    whole = tuple(f"h{dim}" for dim in range(len(sizes)))
    batch = tuple(f"b{dim}" for dim in range(x.ndim - len(sizes)))
    inputs = ((*batch, *whole), *(whole for _ in call.operands[1:]))
    rows = labelled_rows(Labels(inputs, ((*batch, *whole),), whole=frozenset(whole)))
    return Strategies(rows, (x.shape,)), batch


@rule("layer_norm", "x, normalized_shape, weight=None, bias=None, eps=1e-05")
def layer_norm(call: OpCall) -> Strategies:
    """``…[h], [h], [h] -> …[h]``: normalised dims must not be sharded, the others may be sharded."""
    return _last_dims_strategies(call)[0]


@rule("rms_norm", "x, normalized_shape, weight=None, eps=None")
def rms_norm(call: OpCall) -> Strategies:
    """``…[h], [h] -> …[h]``: normalised dims must not be sharded, the others may be sharded."""
    return _last_dims_strategies(call)[0]


@rule("native_layer_norm", "x, normalized_shape, weight, bias, eps")
def native_layer_norm(call: OpCall) -> Strategies:
    """``…[h], [h], [h] -> …[h], …1, …1``: the normalised tensor, the mean and the reciprocal standard deviation."""
    strategies, batch = _last_dims_strategies(call)
    whole = tuple(f"h{dim}" for dim in range(call["x"].ndim - len(batch)))
    statistics = (*batch, *(None for _ in whole))
    inputs = ((*batch, *whole), *(whole for _ in call.operands[1:]))
    rows = labelled_rows(Labels(inputs, ((*batch, *whole), statistics, statistics), whole=frozenset(whole)))
    ((*shape,),) = strategies.outputs
    small = (*shape[: len(batch)], *(1 for _ in whole))
    return Strategies(rows, (tuple(shape), small, small), many=True)


@rule("group_norm", "x, num_groups, weight=None, bias=None, eps=1e-05")
def group_norm(call: OpCall) -> Strategies:
    """``n[c…], [c], [c] -> n[c…]``; channels may also be sharded, if every group stays on one rank."""
    x, groups = call["x"], call["num_groups"]
    if x.ndim < 2 or any(operand.shape != x.shape[1:2] for operand in call.operands[1:]):
        shapes = ", ".join(f"{operand.name} {list(operand.shape)}" for operand in call.operands)
        msg = f"x needs samples and channels, the others one number per channel: {shapes}"
        raise ValueError(msg)
    names = ("n", *(None for _ in range(1, x.ndim)))
    rows = nonempty_rows(Labels((names, *((None,) for _ in call.operands[1:])), (names,)))
    channels = Row((Shard(1), *(Shard(0) for _ in call.operands[1:])), (Shard(1),), sizes=((0, 1, groups),))
    return Strategies((*rows, nonempty_row(channels)), (x.shape,), _own_groups)


def _own_groups(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    del outputs
    channels, local_channels = call["x"].shape[1], targets[0].local_shape[1]
    return (
        LocalCall({"num_groups": call["num_groups"] * local_channels // channels})
        if local_channels != channels
        else None
    )


@rule("channel_norm", "x, mean, var, weight=None, bias=None, eps=1e-05")
def channel_norm(call: OpCall) -> Strategies:
    """``nc…, c, c, c, c -> nc…``: the statistics are arguments, so all dims may be sharded."""
    x = call["x"]
    if x.ndim < 2 or any(operand.shape != x.shape[1:2] for operand in call.operands[1:]):
        shapes = ", ".join(f"{operand.name} {list(operand.shape)}" for operand in call.operands)
        msg = f"x needs samples and channels, the others one number per channel: {shapes}"
        raise ValueError(msg)
    names = ("n", "c", *(f"d{dim}" for dim in range(2, x.ndim)))
    return Strategies(nonempty_rows(Labels((names, *(("c",) for _ in call.operands[1:])), (names,))), (x.shape,))


@decomposition("statistics_norm", "x, dims, weight=None, bias=None, eps=1e-05")
def statistics_norm(ops: Any, x: Any, dims: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Return ``x`` normalised over ``dims``, and its mean and (biased) variance, with the dims kept."""
    x, dtype = reduce_partials(x, "batch_norm"), x.dtype
    if short_dtype(dtype) in {"f16", "bf16"}:
        x = ops.cast(x, dtype=ops.platform.str_to_dtype("float32"))
    mean = reduce_partials(ops.mean(x, dims, True), "batch_norm", "mean")
    centred = ops.sub(x, mean)
    var = reduce_partials(ops.mean(ops.square(centred), dims, True), "batch_norm", "variance")
    out = ops.mul(centred, ops.rsqrt(ops.add(var, eps)))
    channel_shape = (1, -1, *(1,) * (x.ndim - 2))
    if weight is not None:
        out = ops.mul(out, ops.view(weight, channel_shape))
    if bias is not None:
        out = ops.add(out, ops.view(bias, channel_shape))
    return (ops.cast(out, dtype=dtype) if out.dtype != dtype else out), mean, var


def unbiased(shape: Sequence[int], dims: Sequence[int]) -> float:
    """The factor from a biased variance over ``dims`` to that in running statistics (Bessel's correction)."""
    count = math.prod(shape[dim] for dim in dims)
    return count / max(count - 1, 1)


# -- samples -----------------------------------------------------------------------------------------------------------

sample("layer_norm", real("abh"), (size("h"),), real("h"), real("h"))
sample("layer_norm", real("agh"), (size("g"), size("h")), real("gh"))
sample("layer_norm", real("ah"), (size("h"),))
sample("native_layer_norm", real("abh"), (size("h"),), real("h"), real("h"), 1e-5)
sample("rms_norm", real("abh"), (size("h"),), real("h"), 1e-6)
sample("rms_norm", real("agh"), (size("g"), size("h")))
sample("group_norm", real("a", 4, "b"), 2, real(4), real(4))
sample("group_norm", real("a", 6, "bc"), 3)
sample("group_norm", real("a", 6, "b"), 3, real(6), real(6))
sample("channel_norm", real("nch"), real("c").fixed, between(0.3, 2.0, "c").fixed, real("c"), real("c"))
sample("channel_norm", real("nchw"), real("c").fixed, between(0.3, 2.0, "c").fixed)
sample("statistics_norm", real("nch"), (0, 2), real("c"), real("c"))

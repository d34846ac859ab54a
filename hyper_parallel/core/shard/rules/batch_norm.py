"""Normalisation by statistics of many samples: they are those of the whole batch, however it is sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.rule import Strategies, decomposition, rule
from hyper_parallel.core.shard.rules.loss import settled
from hyper_parallel.core.shard.sample import between, real, sample
from hyper_parallel.core.shard.signature import Labels, held_rows
from hyper_parallel.errors import short_dtype

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall

__all__ = ["unbiased"]


@rule("channel_norm", "x, mean, var, weight=None, bias=None, eps=1e-05")
def channel_norm(call: OpCall) -> Strategies:
    """``nc…, c, c, c, c -> nc…``: known statistics, so element by element."""
    x = call["x"]
    if x.ndim < 2 or any(one.shape != x.shape[1:2] for one in call.operands[1:]):
        shapes = ", ".join(f"{one.name} {list(one.shape)}" for one in call.operands)
        msg = f"x needs samples and channels, the others one number per channel: {shapes}"
        raise ValueError(msg)
    names = ("n", "c", *(f"d{dim}" for dim in range(2, x.ndim)))
    return Strategies(held_rows(Labels((names, *(("c",) for _ in call.operands[1:])), (names,))), (x.shape,))


@decomposition("statistics_norm", "x, dims, weight=None, bias=None, eps=1e-05")
def statistics_norm(ops: Any, x: Any, dims: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """``x`` normalised over ``dims``, and its mean and (biased) variance over them, with the dims kept."""
    x, dtype = settled(x, "batch_norm"), x.dtype
    if short_dtype(dtype) in {"f16", "bf16"}:
        x = ops.cast(x, dtype=ops.platform.str_to_dtype("float32"))
    mean = settled(ops.mean(x, dims, True), "batch_norm", "mean")
    centred = ops.sub(x, mean)
    var = settled(ops.mean(ops.square(centred), dims, True), "batch_norm", "variance")
    out = ops.mul(centred, ops.rsqrt(ops.add(var, eps)))
    along = (1, -1, *(1,) * (x.ndim - 2))
    if weight is not None:
        out = ops.mul(out, ops.view(weight, along))
    if bias is not None:
        out = ops.add(out, ops.view(bias, along))
    return (ops.cast(out, dtype=dtype) if out.dtype != dtype else out), mean, var


def unbiased(shape: Sequence[int], dims: Sequence[int]) -> float:
    """What makes a biased variance over ``dims`` the estimate that running statistics take."""
    count = math.prod(shape[dim] for dim in dims)
    return count / max(count - 1, 1)


sample("channel_norm", real("nch"), real("c").fixed, between(0.3, 2.0, "c").fixed, real("c"), real("c"))
sample("channel_norm", real("nchw"), real("c").fixed, between(0.3, 2.0, "c").fixed)
sample("statistics_norm", real("nch"), (0, 2), real("c"), real("c"))

"""The matmul family: contracted dims leave sums pending, everything else runs through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.shard.rule import Strategies, rule
from hyper_parallel.core.shard.signature import Labels, labelled_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall


@rule("linear", "x, weight, bias=None")
def linear(call: OpCall) -> Strategies:
    """``…k, nk, n -> …n``; the bias joins once, whatever the axis does."""
    x, weight, bias = call["x"], call["weight"], call["bias"]
    batch = tuple(f"b{dim}" for dim in range(x.ndim - 1))
    if x.shape[-1] != weight.shape[1]:
        msg = f"x has {x.shape[-1]} features, weight takes {weight.shape[1]}"
        raise ValueError(msg)
    inputs = [(*batch, "k"), ("n", "k")] + ([("n",)] if bias is not None else [])
    labels = Labels(tuple(inputs), ((*batch, "n"),), each=(0, 1), joins=(2,) if bias is not None else ())
    return Strategies(labelled_rows(labels), ((*x.shape[:-1], weight.shape[0]),))

"""Distances between vectors: the vectors' own dim is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.rule import Strategies, decomposition, rule
from hyper_parallel.core.shard.sample import real, sample
from hyper_parallel.core.shard.signature import Labels, held_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall


@rule("pdist", "x, p=2.0")
def pdist(call: OpCall) -> Strategies:
    """``[n][m] -> [k]``: each pair of rows once."""
    count = call["x"].shape[0]
    return Strategies(held_rows(Labels(((None, None),), ((None,),))), ((count * (count - 1) // 2,),))


@decomposition("pairwise_distance", "x1, x2, p=2.0, eps=1e-06, keepdim=False")
def pairwise_distance(ops: Any, x1: Any, x2: Any, p: float, eps: float, keepdim: bool) -> Any:
    """The norm of what two tensors differ by, along the last dim."""
    return ops.vector_norm(ops.add(ops.sub(x1, x2), eps), p, -1, keepdim)


sample("pairwise_distance", real("ab"), real("ab"))
sample("pdist", real("ab"))

"""Distances between vectors: the vectors' own dim is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.rule import Strategies, decomposition, rule
from hyper_parallel.core.shard.signature import Labels, broadcast_labels, held_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall

@rule("cdist", "x, y, p=2.0, compute_mode=None")
def cdist(call: OpCall) -> Strategies:
    """``…p[m], …r[m] -> …pr``; whether matrices are multiplied was decided by the global number of vectors."""
    x, y = call["x"], call["y"]
    if min(x.ndim, y.ndim) < 2 or x.shape[-1] != y.shape[-1]:  # noqa: PLR2004 - matrices
        msg = f"x {list(x.shape)} and y {list(y.shape)} must be …pm and …rm"
        raise ValueError(msg)
    (first, second), batch, sizes = broadcast_labels([x.shape[:-2], y.shape[:-2]], "b")
    labels = Labels(((*first, "p", None), (*second, "r", None)), ((*batch, "p", "r"),))
    return Strategies(held_rows(labels), ((*sizes, x.shape[-2], y.shape[-2]),))


@rule("pdist", "x, p=2.0")
def pdist(call: OpCall) -> Strategies:
    """``[n][m] -> [k]``: each pair of rows once."""
    count = call["x"].shape[0]
    return Strategies(held_rows(Labels(((None, None),), ((None,),))), ((count * (count - 1) // 2,),))


@decomposition("pairwise_distance", "x1, x2, p=2.0, eps=1e-06, keepdim=False")
def pairwise_distance(ops: Any, x1: Any, x2: Any, p: float, eps: float, keepdim: bool) -> Any:
    """The norm of what two tensors differ by, along the last dim."""
    return ops.vector_norm(ops.add(ops.sub(x1, x2), eps), p, -1, keepdim)

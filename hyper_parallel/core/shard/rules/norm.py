"""Normalisations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.shard.rule import Strategies, rule
from hyper_parallel.core.shard.signature import Labels, labelled_rows

if TYPE_CHECKING:
    from hyper_parallel.core.shard.call import OpCall


@rule("layer_norm", "x, normalized_shape, weight=None, bias=None, eps=1e-05")
def layer_norm(call: OpCall) -> Strategies:
    """``…[h], [h], [h] -> …[h]``."""
    x, count = call["x"], len(call["normalized_shape"])
    if tuple(x.shape[x.ndim - count :]) != tuple(call["normalized_shape"]):
        msg = f"normalized_shape {list(call['normalized_shape'])} does not end x's shape {list(x.shape)}"
        raise ValueError(msg)
    whole = tuple(f"h{dim}" for dim in range(count))
    batch = tuple(f"b{dim}" for dim in range(x.ndim - count))
    inputs = ((*batch, *whole), *(whole for _ in call.operands[1:]))
    return Strategies(labelled_rows(Labels(inputs, ((*batch, *whole),), whole=frozenset(whole))), (x.shape,))

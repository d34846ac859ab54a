"""Sequence parallel: norms and dropouts compute on a piece of the sequence with whole weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel.styles.base import WholeStyle, options, to_local

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary

__all__ = ["SequenceParallel"]


class SequenceParallel(WholeStyle):
    """Replicate the parameters of a norm or dropout and compute on the sequence dim's shards.

    ::

        x_BLD     [B, L@tp, D]       @tp Shard(sequence_dim)
        w_D       [D]                @tp Replicate       (its gradient is summed over tp: true on every rank)
        y_BLD     [B, L@tp, D]       @tp Shard(sequence_dim)

    A plain input is this rank's piece; the ranks agree on the length of the sequence by exchanging one size, so
    lengths that do not divide are understood. A DTensor is brought to the layout first.

    Args:
        sequence_dim: dim of the sequence.
        use_local_output: return this rank's piece instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = Shard(sequence_dim).dim
        self.use_local_output = use_local_output

    def _enter(self, edge: Boundary, value: Any, name: str) -> DTensor:
        sharding = Shard(self.sequence_dim)
        return edge.move(edge.enter(value, sharding, name), sharding, name)

    def _leave(self, edge: Boundary, value: Any) -> Any:  # noqa: ARG002 - the layout is what the module made
        return to_local(value) if self.use_local_output else value

    def __repr__(self) -> str:
        """Every option."""
        return options(self, "sequence_dim", "use_local_output")

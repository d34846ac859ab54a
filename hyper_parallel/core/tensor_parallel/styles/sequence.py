"""Sequence parallelism (Korthikanti et al., 2022): norms and dropouts compute on shards of the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import to_local
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel.styles.base import ReplicatedStyle, options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.tensor_parallel.styles.base import BoundaryLayout
    from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary

__all__ = ["SequenceParallel"]


class SequenceParallel(ReplicatedStyle):
    """Replicate the parameters of a norm or dropout and compute on the sequence dim's shards.

    ::

        x_BLD     [B, L@tp, D]       @tp Shard(sequence_dim)
        w_D       [D]                @tp Replicate       (its gradient is summed over tp)
        y_BLD     [B, L@tp, D]       @tp Shard(sequence_dim)

    A plain input is the local shard; the ranks exchange one size to agree on the length of the sequence, so it need not
    be divisible. A DTensor is redistributed first.

    Args:
        sequence_dim: dim of the sequence.
        use_local_output: return the local tensor instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = Shard(sequence_dim).dim
        self.use_local_output = use_local_output

    def outputs(self) -> Sequence[BoundaryLayout]:
        """Shards of the sequence."""
        return ((Shard(self.sequence_dim), self.use_local_output),)

    def _enter(self, edge: Boundary, value: Any, name: str) -> DTensor:
        sharding = Shard(self.sequence_dim)
        return edge.move(edge.enter(value, sharding, name), sharding, name)

    def _leave(self, edge: Boundary, value: Any, *, local: bool) -> Any:
        del edge  # the output keeps its layout
        return to_local(value) if local else value

    def __repr__(self) -> str:
        """Return the style with all its options."""
        return options(self, "sequence_dim", "use_local_output")

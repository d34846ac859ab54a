"""``HeadNorm``: norms of queries and keys, each of which normalizes the heads that its rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor, to_local
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel.styles.base import ReplicatedStyle, options
from hyper_parallel.core.tensor_parallel.styles.boundary import parallel_axis
from hyper_parallel.core.tensor_parallel.styles.heads import HeadCounts, attention_among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary

__all__ = ["HeadNorm"]

_HEADS = "_hyper_parallel_heads"


class HeadNorm(ReplicatedStyle):
    """Replicate the parameters of a norm within attention, and compute on the heads of the rank.

    ::

        x_BLHE    [B, L, H@tp, E]    @tp Shard(dim of heads), here or in [B, H, L, E]
        w_E       [E]                @tp Replicate       (its gradient is summed over tp)
        y_BLHE    [B, L, H@tp, E]    like the input

    For ``q_norm`` and ``k_norm`` between column-wise projections with local outputs and attention. The norm is along
    the last dim, which must not be sharded. A plain input is the rank's heads; a DTensor keeps its layout.

    Args:
        use_local_output: return the local tensor instead of a DTensor.

    Example:
        >>> plan = {"[qkv]_proj": ColwiseParallel(), "[qk]_norm": HeadNorm(), "o_proj": RowwiseParallel()}
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output

    def owner_among(self, ancestors: Sequence[Any]) -> Any:
        """The attention module: the nearest ancestor that keeps numbers of heads."""
        return attention_among(ancestors, super().owner_among(ancestors))

    def apply_within(self, owner: Any, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelize a norm of the attention module ``owner``, whose numbers of heads identify the dim of heads."""
        counts, size = HeadCounts.of(owner), device_mesh.shape[parallel_axis(device_mesh)]
        if counts is not None:
            totals = (counts.heads, counts.kv_heads, counts.repeated(size))
            module.__dict__[_HEADS] = {total // size for total in totals if total % size == 0}
        return self.apply(module, device_mesh)

    def _enter(self, edge: Boundary, value: Any, name: str) -> DTensor:
        if isinstance(value, DTensor):
            return edge.enter(value, Shard(-2), name)
        edge.require_tensor(value, name)
        counts = edge.cell.__dict__.get(_HEADS, ())
        # If both dims match, either gives the same values: the norm is along the last dim.
        dims = [dim for dim in range(1, len(value.shape) - 1) if value.shape[dim] in counts]
        return edge.enter(value, Shard(dims[-1] if dims else -2), name)

    def _leave(self, edge: Boundary, value: Any, *, local: bool) -> Any:
        del edge  # the output keeps its layout
        return to_local(value) if local else value

    def __repr__(self) -> str:
        """Return the style with all its options."""
        return options(self, "use_local_output")

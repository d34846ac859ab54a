"""Sequence parallel: norms and dropouts compute on a piece of the sequence with whole weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.module import replicate_module
from hyper_parallel.core.dtensor.placements import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.base import (
    ParallelStyle,
    convert_first,
    first_argument,
    options,
    to_local,
)
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, parallel_axis
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["SequenceParallel"]


class SequenceParallel(ParallelStyle):
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

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """All of them whole."""
        return dict.fromkeys(platform_of(module).parameters_dict(module), Replicate())

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Replicate the parameters, hook input and output."""
        platform = platform_of(module)
        axis, name = parallel_axis(device_mesh), first_argument(platform, module)
        replicate_module(platform, module, device_mesh, src_data_rank=self.src_data_rank)
        sharding = Shard(self.sequence_dim)

        def before(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            edge = Boundary(type(self).__name__, cell, device_mesh, axis)

            def enter(value: Any) -> DTensor:
                return edge.move(edge.enter(value, sharding, name), sharding, name)

            return convert_first(edge, name, args, kwargs, enter)

        platform.register_forward_pre_hook(module, before, with_kwargs=True)
        if self.use_local_output:
            platform.register_forward_hook(module, lambda _, __, output: platform.tree_map(to_local, output))
        return module

    def __repr__(self) -> str:
        """Every option."""
        return options(self, "sequence_dim", "use_local_output")

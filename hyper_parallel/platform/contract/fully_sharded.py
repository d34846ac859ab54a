"""Options of the framework's part of ``fully_shard``: placement of parameters, and dtypes.

Also the errors that both frameworks raise, and their reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import PlanError

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks

__all__ = ["ACCUMULATED", "KEPT", "FullyShardedOptions", "Reduction", "replaced_parameter", "unreduced_gradient"]

ACCUMULATED = "it was accumulated under no_sync(); before the step, run the last backward outside of no_sync()"
"""The reason why an accumulated gradient is not reduced."""

KEPT = "it was not reduced over the replicas; before the step, run the last backward with set_requires_all_reduce(True)"
"""The reason why a gradient that will be summed over the replicas later is not reduced."""


@dataclass(frozen=True)
class FullyShardedOptions:
    """How a group of parameters is sharded.

    Attributes:
        ranks: global ranks over which each parameter is sharded.
        replicas: global ranks that hold the same shards as this one, itself included.
        reshard: free the gathered parameters after forward; None: unless the group is outermost.
        param_dtype: dtype of the gathered parameters; None: that of the shards.
        reduce_dtype: dtype in which gradients are reduced; None: that of the gathered parameters.
        output_dtype: dtype of the module's floating outputs; None leaves them as they are.
        cast_forward_inputs: cast floating inputs to ``param_dtype``, if there is one.
        on_data_axes: whether parameters are DTensors on a mesh that includes the data axes. Gradients of values sharded
            over these axes are then sums over all ranks, not means.
    """

    ranks: Ranks
    replicas: Ranks
    reshard: bool | None = None
    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    on_data_axes: bool = False

    @property
    def count(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return len(self.ranks) * len(self.replicas)


@dataclass
class Reduction:
    """How the gradients of a group are reduced; may be changed between passes.

    Attributes:
        averages: divide the sum by the number of ranks over which the parameters are sharded or replicated.
        adds_copies: also add up the gradients of a parameter's copies along the replicated axes of its own mesh; for
            meshes whose ranks along those axes compute with different shards of a sequence.
        over_replicas: reduce over the replicas; if not, the sum is kept until a pass that does.
        on_main_grad: add to ``main_grad``, a float32 DTensor, and leave ``grad`` alone.
    """

    averages: bool = True
    adds_copies: bool = False
    over_replicas: bool = True
    on_main_grad: bool = False


def replaced_parameter(name: str, owner: Any) -> PlanError:
    """Return the error for parameter ``name`` of module ``owner`` that is not the one that was sharded."""
    return PlanError(
        f"fully_shard: parameter {name} of {type(owner).__name__} was replaced or converted after fully_shard, which "
        "gathers the original parameter; convert the module first, and load values into its parameters"
    )


def unreduced_gradient(name: str, reason: str) -> PlanError:
    """Return the error for an optimizer step on parameter ``name``, whose gradient is not reduced yet."""
    return PlanError(f"optimizer step: the gradient of {name} is not reduced: {reason}")

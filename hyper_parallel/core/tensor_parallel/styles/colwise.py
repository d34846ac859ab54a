"""Column-wise parallelism (Megatron-LM; Shoeybi et al., 2019): each rank computes part of the output features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.base import LayerStyle
from hyper_parallel.core.tensor_parallel.styles.boundary import check_spec
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["ColwiseParallel"]


class ColwiseParallel(LayerStyle):
    """Shard a linear or embedding layer by its output features.

    ::

        linear       x_BLD     [B, L, D]          @tp Replicate     (input_layouts -> Replicate)
                     w_FD      [F@tp, D]          @tp Shard(0)
                     b_F       [F@tp]             @tp Shard(0)
                     y_BLF     [B, L, F@tp]       @tp Shard(-1)     (-> output_layouts)
        embedding    ids_BL    [B, L]             @tp Replicate
                     w_VD      [V, D@tp]          @tp Shard(1)
                     y_BLD     [B, L, D@tp]       @tp Shard(-1)

    Nothing is communicated in forward unless the layouts ask for it; the gradient of x is all-reduced over tp once.

    Args:
        input_layouts: layout of a plain input along tp; Replicate by default. DTensors keep their own layout.
        output_layouts: wanted layout of the output; ``Shard(-1)`` by default.
        use_local_output: return the local tensor instead of a DTensor.

    Example:
        >>> parallelize_module(mlp, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    """

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        name = type(self).__name__
        self.input_layouts = (
            check_spec(Replicate() if input_layouts is None else input_layouts, "input_layouts", name),
        )
        self.output_layouts = (
            check_spec(Shard(-1) if output_layouts is None else output_layouts, "output_layouts", name),
        )
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """Output features are dim 0 of a linear weight and of the bias, dim 1 of an embedding's."""
        platform = platform_of(module)
        weight, bias = platform.layer_parameters(module)
        if platform.is_embedding_module(module):
            return {weight: Shard(1)}
        return {weight: Shard(0), **({} if bias is None else {bias: Shard(0)})}

    def _computation_placement(self, platform: Platform, module: Any) -> Placement:
        del platform, module
        return Replicate()

"""Row-wise parallelism (Megatron-LM; Shoeybi et al., 2019): each rank uses part of the input features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.base import LayerStyle
from hyper_parallel.core.tensor_parallel.styles.boundary import check_spec
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["RowwiseParallel"]


class RowwiseParallel(LayerStyle):
    """Shard a linear layer by its input features, an embedding by its vocabulary.

    ::

        linear       x_BLF     [B, L, F@tp]       @tp Shard(-1)     (input_layouts -> Shard(-1))
                     w_DF      [D, F@tp]          @tp Shard(1)
                     b_D       [D]                @tp Replicate     (added once)
                     y_BLD     [B, L, D]          @tp Partial(sum)  (-> output_layouts, Replicate by default)
        embedding    ids_BL    [B, L]             @tp Replicate     (input_layouts -> Replicate)
                     w_VD      [V@tp, D]          @tp Shard(0)      (ids outside a rank's rows give zeros)
                     y_BLD     [B, L, D]          @tp Partial(sum)

    One all-reduce in forward (a reduce-scatter if ``output_layouts`` is a shard), none in backward.

    Args:
        input_layouts: layout of a plain input along tp; ``Shard(-1)`` by default, Replicate for an embedding.
            The number of features need not be divisible by the number of ranks. DTensors keep their own layout.
        output_layouts: layout of the output; Replicate by default.
        use_local_output: return the local tensor instead of a DTensor.
    """

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        name = type(self).__name__
        self._has_input_layouts = input_layouts is not None
        self.input_layouts = (
            check_spec(input_layouts if self._has_input_layouts else Shard(-1), "input_layouts", name),
        )
        self.output_layouts = (
            check_spec(Replicate() if output_layouts is None else output_layouts, "output_layouts", name),
        )
        self.use_local_output = use_local_output

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """Shard a linear weight by its input features (dim 1), an embedding by its rows (dim 0); replicate the bias."""
        platform = platform_of(module)
        weight, bias = platform.layer_parameters(module)
        if platform.is_embedding_module(module):
            return {weight: Shard(0)}
        return {weight: Shard(1), **({} if bias is None else {bias: Replicate()})}

    def _source(self, platform: Platform, module: Any) -> Any:
        # Ids have no features to shard: by default, every rank has all of them.
        return self.input_layouts[0] if self._has_input_layouts or platform.is_linear_module(module) else Replicate()

    def _computation_placement(self, platform: Platform, module: Any) -> Placement:
        return Shard(-1) if platform.is_linear_module(module) else Replicate()

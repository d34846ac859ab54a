"""Convert what comes out of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, options
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, parallel_axis
from hyper_parallel.core.tensor_parallel.styles.prepare import convert, read_many
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["PrepareModuleOutput"]


class PrepareModuleOutput(ParallelStyle):
    """Make a module's outputs DTensors, and bring them to the layouts that its consumers want.

    ::

        y_BLD     [B, L, D]      output_layouts          @tp Replicate
          ->      [B, L@tp, D]   desired_output_layouts  @tp Shard(1)

    Args:
        output_layouts: per output how a plain one is held along tp, or None to leave the output alone; a single
            placement for a single output. DTensors bring their own layout.
        desired_output_layouts: per output the wanted layout; None keeps it.
        use_local_output: return this rank's pieces instead of DTensors.

    Raises:
        ValueError: the two descriptions do not have the same outputs.
    """

    def __init__(self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool = True) -> None:
        name = type(self).__name__
        self.output_layouts = read_many(output_layouts, "output_layouts", name) or ()
        self.desired_output_layouts = read_many(desired_output_layouts, "desired_output_layouts", name) or ()
        self.use_local_output = use_local_output
        if len(self.output_layouts) != len(self.desired_output_layouts):
            msg = (
                f"{name}: output_layouts has {len(self.output_layouts)} entries, "
                f"desired_output_layouts has {len(self.desired_output_layouts)}"
            )
            raise ValueError(msg)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Hook the outputs."""
        axis = parallel_axis(device_mesh)

        def after(cell: Any, args: Any, output: Any) -> Any:
            del args
            return self._outputs(Boundary(type(self).__name__, cell, device_mesh, axis), output)

        platform_of(module).register_forward_hook(module, after)
        return module

    def _outputs(self, edge: Boundary, output: Any) -> Any:
        many = isinstance(output, (list, tuple))
        outputs = tuple(output) if many else (output,)
        if len(outputs) != len(self.output_layouts):
            msg = (
                f"{edge.module}: {len(outputs)} outputs, but output_layouts of {edge.style} has "
                f"{len(self.output_layouts)} entries; give one per output, None for those to leave alone"
            )
            raise ValueError(msg)
        pairs = zip(self.output_layouts, self.desired_output_layouts, strict=True)
        converted = [
            convert(edge, value, pair, f"output {index}", use_local=self.use_local_output)
            for index, (value, pair) in enumerate(zip(outputs, pairs, strict=True))
        ]
        if not many:
            return converted[0]
        return type(output)(*converted) if hasattr(output, "_fields") else type(output)(converted)

    def __repr__(self) -> str:
        """Every option."""
        return options(self, "output_layouts", "desired_output_layouts", "use_local_output")

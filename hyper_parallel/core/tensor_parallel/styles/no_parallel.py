"""No parallelism: whole weights, whole activations, so that a module fits between DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.module import replicate_module
from hyper_parallel.core.dtensor.placements import Placement, Replicate
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, convert_first, first_argument, options
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, check_spec, parallel_axis
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["NoParallel"]


class NoParallel(ParallelStyle):
    """Replicate a module's parameters and buffers, and compute the whole of it on every rank of tp.

    ::

        x_BLD     [B, L, D]          @tp Replicate       (input_layout -> Replicate)
        w         whole              @tp Replicate
        y_BLD     [B, L, D]          @tp Replicate       (-> output_layout)

    Args:
        input_layout: how a plain input is held along tp; Replicate by default. DTensors bring their own layout.
        output_layout: wanted layout of the output; Replicate by default.
        use_local_output: return this rank's piece instead of a DTensor.
    """

    def __init__(self, *, input_layout: Any = None, output_layout: Any = None, use_local_output: bool = True) -> None:
        name = type(self).__name__
        self.input_layout = check_spec(Replicate() if input_layout is None else input_layout, "input_layout", name)
        self.output_layout = check_spec(Replicate() if output_layout is None else output_layout, "output_layout", name)
        self.use_local_output = use_local_output

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """All of them whole."""
        return dict.fromkeys(platform_of(module).parameters_dict(module), Replicate())

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Replicate parameters and buffers, hook input and output."""
        platform = platform_of(module)
        axis, name = parallel_axis(device_mesh), first_argument(platform, module)
        replicate_module(platform, module, device_mesh, src_data_rank=self.src_data_rank)

        def before(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            edge = Boundary(type(self).__name__, cell, device_mesh, axis)

            def enter(value: Any) -> DTensor:
                return edge.move(edge.enter(value, self.input_layout, name), Replicate(), name)

            return convert_first(edge, name, args, kwargs, enter)

        def after(cell: Any, _: Any, output: Any) -> Any:
            edge = Boundary(type(self).__name__, cell, device_mesh, axis)
            return platform.tree_map(lambda one: self._leave(edge, one), output)

        platform.register_forward_pre_hook(module, before, with_kwargs=True)
        platform.register_forward_hook(module, after)
        return module

    def _leave(self, edge: Boundary, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        moved = edge.move(value, self.output_layout, "output")
        return moved.to_local() if self.use_local_output else moved

    def __repr__(self) -> str:
        """Every option."""
        return options(self, "input_layout", "output_layout", "use_local_output")

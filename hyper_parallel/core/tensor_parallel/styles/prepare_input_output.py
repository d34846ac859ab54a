"""Convert what goes into a module and what comes out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.prepare_input import PrepareModuleInput
from hyper_parallel.core.tensor_parallel.styles.prepare_output import PrepareModuleOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["PrepareModuleInputOutput"]


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` on one module.

    ::

        x_BLD     [B, L@tp, D]   ->  [B, L, D]      input_layouts -> desired_input_layouts
        y_BLD     [B, L, D]      ->  [B, L@tp, D]   output_layouts -> desired_output_layouts

    Args:
        input_layouts: see :class:`PrepareModuleInput`.
        desired_input_layouts: see there.
        input_kwarg_layouts: see there.
        desired_input_kwarg_layouts: see there.
        use_local_input: hand this rank's pieces to the module instead of DTensors.
        output_layouts: see :class:`PrepareModuleOutput`.
        desired_output_layouts: see there.
        use_local_output: return this rank's pieces instead of DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Hook inputs and outputs."""
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)

    def __repr__(self) -> str:
        """Every option."""
        before, after = self.prepare_module_input, self.prepare_module_output
        facts = {
            "input_layouts": before.input_layouts,
            "desired_input_layouts": before.desired_input_layouts,
            "input_kwarg_layouts": before.input_kwarg_layouts,
            "desired_input_kwarg_layouts": before.desired_input_kwarg_layouts,
            "use_local_input": before.use_local_output,
            "output_layouts": after.output_layouts,
            "desired_output_layouts": after.desired_output_layouts,
            "use_local_output": after.use_local_output,
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"

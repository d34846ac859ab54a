"""Convert what goes into a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, options
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, parallel_axis
from hyper_parallel.core.tensor_parallel.styles.prepare import convert, read_many, read_named
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["PrepareModuleInput"]


class PrepareModuleInput(ParallelStyle):
    """Make a module's inputs DTensors, and bring them to the layouts that it wants.

    ::

        x_BLD     [B, L@tp, D]   input_layouts          @tp Shard(1)
          ->      [B, L, D]      desired_input_layouts  @tp Replicate       (all-gather; reduce-scatter in backward)

    Args:
        input_layouts: per positional input how a plain one is held along tp, or None to leave the input alone; a
            single placement for a single input. An entry may tell the whole story, a tuple of placements per mesh
            axis or of aliases per dim. DTensors bring their own layout.
        desired_input_layouts: per positional input the wanted layout; None keeps it.
        input_kwarg_layouts: the same for keyword inputs, by name; inputs not named are left alone.
        desired_input_kwarg_layouts: the wanted ones.
        use_local_output: hand this rank's pieces to the module instead of DTensors.

    Raises:
        ValueError: the two descriptions do not have the same inputs.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = read_many(input_layouts, "input_layouts", name)
        self.desired_input_layouts = read_many(desired_input_layouts, "desired_input_layouts", name)
        self.input_kwarg_layouts = read_named(input_kwarg_layouts, "input_kwarg_layouts", name)
        self.desired_input_kwarg_layouts = read_named(desired_input_kwarg_layouts, "desired_input_kwarg_layouts", name)
        self.use_local_output = use_local_output
        self._check(name)

    def _check(self, name: str) -> None:
        held, wanted = self.input_layouts, self.desired_input_layouts
        if held is not None and wanted is None:
            msg = f"{name}: input_layouts needs desired_input_layouts, one per input"
            raise ValueError(msg)
        if len(held or ()) != len(wanted or ()):
            msg = f"{name}: input_layouts has {len(held or ())} entries, desired_input_layouts has {len(wanted or ())}"
            raise ValueError(msg)
        named, named_wanted = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        if set(named) != set(named_wanted):
            msg = (
                f"{name}: input_kwarg_layouts names {sorted(named)}, "
                f"desired_input_kwarg_layouts names {sorted(named_wanted)}"
            )
            raise ValueError(msg)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Hook the inputs."""
        axis = parallel_axis(device_mesh)

        def before(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            edge = Boundary(type(self).__name__, cell, device_mesh, axis)
            return self._positional(edge, args), self._named(edge, kwargs)

        platform_of(module).register_forward_pre_hook(module, before, with_kwargs=True)
        return module

    def _positional(self, edge: Boundary, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.input_layouts is None or self.desired_input_layouts is None:
            return args
        if len(args) != len(self.input_layouts):
            msg = (
                f"{edge.module}: {len(args)} positional inputs, but input_layouts of {edge.style} has "
                f"{len(self.input_layouts)} entries; give one per input, None for those to leave alone"
            )
            raise ValueError(msg)
        pairs = zip(self.input_layouts, self.desired_input_layouts, strict=True)
        return tuple(
            convert(edge, value, pair, f"input {index}", use_local=self.use_local_output)
            for index, (value, pair) in enumerate(zip(args, pairs, strict=True))
        )

    def _named(self, edge: Boundary, kwargs: dict[str, Any]) -> dict[str, Any]:
        held, wanted = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return {
            name: convert(edge, value, (held.get(name), wanted.get(name)), name, use_local=self.use_local_output)
            for name, value in kwargs.items()
        }

    def __repr__(self) -> str:
        """Every option."""
        return options(
            self,
            "input_layouts",
            "desired_input_layouts",
            "input_kwarg_layouts",
            "desired_input_kwarg_layouts",
            "use_local_output",
        )

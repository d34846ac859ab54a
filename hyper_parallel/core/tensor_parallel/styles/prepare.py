"""Styles that convert the inputs and outputs of a module and leave its parameters alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Placement, own_placements
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, options
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, check_spec, parallel_axis
from hyper_parallel.errors import ArgumentTypeError, StyleError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.tensor_parallel.styles.base import BoundaryLayout

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Specs = tuple[Any, ...]


class ConversionStyle(ParallelStyle):
    """Base of the styles that convert inputs or outputs of a module and leave its parameters alone."""

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """Return nothing: parameters are not placed."""
        del module
        return {}


class PrepareModuleInput(ConversionStyle):
    """Make a module's inputs DTensors, and bring them to the layouts that the module wants.

    ::

        x_BLD     [B, L@tp, D]   input_layouts          @tp Shard(1)
          ->      [B, L, D]      desired_input_layouts  @tp Replicate       (all-gather; reduce-scatter in backward)

    Args:
        input_layouts: per positional input the layout of a plain tensor along tp, or None to leave the input alone;
            a single placement for a single input. An entry may also describe all mesh axes: a tuple of one placement
            per mesh axis or of one alias per dim. DTensors keep their own layout.
        desired_input_layouts: per positional input the wanted layout; None keeps it.
        input_kwarg_layouts: the same for keyword inputs, by name; inputs without an entry are left alone.
        desired_input_kwarg_layouts: the wanted layouts of keyword inputs, by name.
        use_local_output: pass local tensors to the module instead of DTensors.

    Raises:
        StyleError: (a ValueError and AssertionError) the two arguments do not describe the same inputs.
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
        self.input_layouts = _read_sequence(input_layouts, "input_layouts", name)
        self.desired_input_layouts = _read_sequence(desired_input_layouts, "desired_input_layouts", name)
        self.input_kwarg_layouts = _read_named(input_kwarg_layouts, "input_kwarg_layouts", name)
        self.desired_input_kwarg_layouts = _read_named(desired_input_kwarg_layouts, "desired_input_kwarg_layouts", name)
        self.use_local_output = use_local_output
        if self.input_layouts is not None and self.desired_input_layouts is None:
            msg = f"{name}: input_layouts needs desired_input_layouts, one per input"
            raise StyleError(msg)
        _check_lengths(name, "input_layouts", self.input_layouts or (), self.desired_input_layouts or ())
        self._check_names(name)

    def _check_names(self, name: str) -> None:
        source, target = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        if set(source) != set(target):
            msg = (
                f"{name}: input_kwarg_layouts names {sorted(source)}, "
                f"desired_input_kwarg_layouts names {sorted(target)}"
            )
            raise StyleError(msg)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Register the hooks that convert inputs."""
        before = partial(self._before, device_mesh, parallel_axis(device_mesh))
        platform_of(module).register_forward_pre_hook(module, before, with_kwargs=True)
        return module

    def inputs(self) -> Sequence[BoundaryLayout]:
        """The inputs that are converted, positional ones first."""
        named, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return (
            *_handed_over(self.input_layouts or (), self.desired_input_layouts or (), local=self.use_local_output),
            *_handed_over(named.values(), [desired[name] for name in named], local=self.use_local_output),
        )

    def _before(
        self, mesh: DeviceMesh, axis: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        edge = Boundary(type(self).__name__, module, mesh, axis)
        return self._positional(edge, args), self._named(edge, kwargs)

    def _positional(self, edge: Boundary, args: tuple[Any, ...]) -> tuple[Any, ...]:
        source, target = self.input_layouts, self.desired_input_layouts
        if source is None or target is None:
            return args
        return _convert_all(edge, "input", args, source, target, use_local=self.use_local_output)

    def _named(self, edge: Boundary, kwargs: dict[str, Any]) -> dict[str, Any]:
        source, target = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return {
            name: _convert(edge, value, source.get(name), target.get(name), name, use_local=self.use_local_output)
            for name, value in kwargs.items()
        }

    def __repr__(self) -> str:
        """Return the style with all its options."""
        return options(
            self,
            "input_layouts",
            "desired_input_layouts",
            "input_kwarg_layouts",
            "desired_input_kwarg_layouts",
            "use_local_output",
        )


class PrepareModuleOutput(ConversionStyle):
    """Convert a module's outputs to DTensors and redistribute them to the layouts that its consumers need.

    ::

        y_BLD     [B, L, D]      output_layouts          @tp Replicate
          ->      [B, L@tp, D]   desired_output_layouts  @tp Shard(1)

    Args:
        output_layouts: per output the layout of a plain tensor along tp, or None to leave the output alone; a single
            placement for a single output. DTensors keep their own layout.
        desired_output_layouts: per output the wanted layout; None keeps it.
        use_local_output: return local tensors instead of DTensors.

    Raises:
        StyleError: (a ValueError and AssertionError) the two descriptions do not have the same outputs.
    """

    def __init__(self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool = True) -> None:
        name = type(self).__name__
        self.output_layouts = _read_sequence(output_layouts, "output_layouts", name) or ()
        self.desired_output_layouts = _read_sequence(desired_output_layouts, "desired_output_layouts", name) or ()
        self.use_local_output = use_local_output
        _check_lengths(name, "output_layouts", self.output_layouts, self.desired_output_layouts)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Register the hook that converts outputs."""
        after = partial(self._after, device_mesh, parallel_axis(device_mesh))
        platform_of(module).register_forward_hook(module, after)
        return module

    def outputs(self) -> Sequence[BoundaryLayout]:
        """The outputs that are converted."""
        return _handed_over(self.output_layouts, self.desired_output_layouts, local=self.use_local_output)

    def _after(self, mesh: DeviceMesh, axis: int, module: Any, args: Any, output: Any) -> Any:
        del args
        return self._outputs(Boundary(type(self).__name__, module, mesh, axis), output)

    def _outputs(self, edge: Boundary, output: Any) -> Any:
        several = isinstance(output, (list, tuple))
        outputs = tuple(output) if several else (output,)
        layouts = self.output_layouts, self.desired_output_layouts
        converted = _convert_all(edge, "output", outputs, *layouts, use_local=self.use_local_output)
        if not several:
            return converted[0]
        return type(output)(*converted) if hasattr(output, "_fields") else type(output)(converted)

    def __repr__(self) -> str:
        """Return the style with all its options."""
        return options(self, "output_layouts", "desired_output_layouts", "use_local_output")


class PrepareModuleInputOutput(ConversionStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` on one module.

    ::

        x_BLD     [B, L@tp, D]   ->  [B, L, D]      input_layouts -> desired_input_layouts
        y_BLD     [B, L, D]      ->  [B, L@tp, D]   output_layouts -> desired_output_layouts

    Args:
        input_layouts: see :class:`PrepareModuleInput`.
        desired_input_layouts: see :class:`PrepareModuleInput`.
        input_kwarg_layouts: see :class:`PrepareModuleInput`.
        desired_input_kwarg_layouts: see :class:`PrepareModuleInput`.
        use_local_input: pass local tensors to the module instead of DTensors.
        output_layouts: see :class:`PrepareModuleOutput`.
        desired_output_layouts: see :class:`PrepareModuleOutput`.
        use_local_output: return local tensors instead of DTensors.
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
        """Register the hooks that convert inputs and outputs."""
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)

    def inputs(self) -> Sequence[BoundaryLayout]:
        """The inputs that are converted."""
        return self.prepare_module_input.inputs()

    def outputs(self) -> Sequence[BoundaryLayout]:
        """The outputs that are converted."""
        return self.prepare_module_output.outputs()

    def __repr__(self) -> str:
        """Return the style with all its options."""
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


def _read_sequence(layouts: Any, option: str, style: str) -> Specs | None:
    """One spec per value; a single placement stands for one value."""
    if layouts is None:
        return None
    layouts = own_placements(layouts)
    if isinstance(layouts, Placement):
        return (layouts,)
    if not isinstance(layouts, (list, tuple)):
        msg = f"{style}: {option} must be a placement or a tuple with one layout (or None) per value, got {layouts!r}"
        raise ArgumentTypeError(msg)
    return tuple(
        None if spec is None else check_spec(spec, f"{option}[{index}]", style) for index, spec in enumerate(layouts)
    )


def _handed_over(source: Iterable[Any], target: Iterable[Any], *, local: bool) -> tuple[BoundaryLayout, ...]:
    """The layouts of values after their conversion, without those that are left alone."""
    pairs = zip(source, target, strict=True)
    return tuple((before if after is None else after, local) for before, after in pairs if before is not None)


def _read_named(layouts: Mapping[str, Any] | None, option: str, style: str) -> dict[str, Any]:
    """One spec per keyword."""
    return {
        name: None if spec is None else check_spec(spec, f"{option}[{name!r}]", style)
        for name, spec in (layouts or {}).items()
    }


def _check_lengths(style: str, option: str, source: Specs, target: Specs) -> None:
    """Raise a StyleError unless there is a wanted layout per layout."""
    if len(source) != len(target):
        msg = f"{style}: {option} has {len(source)} entries, desired_{option} has {len(target)}"
        raise StyleError(msg)


def _convert_all(
    edge: Boundary, role: str, values: Sequence[Any], source: Specs, target: Specs, *, use_local: bool
) -> tuple[Any, ...]:
    """The inputs or outputs (``role``) of a module, converted by position.

    Raises:
        StyleError: (a ValueError) there are more or fewer values than layouts.
    """
    if len(values) != len(source):
        positional = "positional " if role == "input" else ""
        msg = (
            f"{edge.module}: {len(values)} {positional}{role}s, but {role}_layouts of {edge.style} has "
            f"{len(source)} entries; give one per {role}, None for those to leave alone"
        )
        raise StyleError(msg)
    return tuple(
        _convert(edge, value, before, after, f"{role} {index}", use_local=use_local)
        for index, (value, before, after) in enumerate(zip(values, source, target, strict=True))
    )


def _convert(edge: Boundary, value: Any, source: Any, target: Any, argument: str, *, use_local: bool) -> Any:
    """``value`` as a DTensor in layout ``target``, or its local tensor; without ``source`` the value is left alone."""
    if source is None:
        return value
    entered = edge.enter(value, source, argument)
    moved = entered if target is None else edge.move(entered, target, argument)
    return moved.to_local() if use_local else moved

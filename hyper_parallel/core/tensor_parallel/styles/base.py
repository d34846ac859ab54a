"""The interface of parallel styles, and the base classes of this package's styles."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.module import place_parameter, replicate_module
from hyper_parallel.core.dtensor.placements import Placement, Replicate
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, on_axis, parallel_axis
from hyper_parallel.errors import StyleError, UnsupportedModuleError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "BoundaryLayout", "LayerStyle", "ParallelStyle", "ReplicatedStyle", "convert_first", "first_argument", "options",
    "style_of",
]  # fmt: skip

_STYLED = "_hyper_parallel_style"


def style_of(module: Any) -> str | None:
    """Return the name of the style of this package by which a layer was parallelized, or None."""
    name: str | None = module.__dict__.get(_STYLED)
    return name


Args = tuple[Any, ...]
Kwargs = dict[str, Any]

BoundaryLayout = tuple[Any, bool | None]
"""The layout of a value at a style's boundary, and whether the value is a local tensor (None: like the input)."""


class ParallelStyle(abc.ABC):
    """How one module is parallelized.

    Subclass it with ``apply(module, device_mesh) -> module``; a subclass written for PyTorch, with ``_apply``, works
    unchanged. The other methods are called to check or complete a plan, so they must not change the module.

    Attributes:
        src_data_rank: position in the mesh of the rank whose parameter values are used; None: every rank keeps its
            own values.
        has_whole_siblings: whether a linear layer next to the module is meant to be replicated, such as the router of
            experts.
    """

    src_data_rank: int | None = 0
    has_whole_siblings: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept a subclass that implements either ``apply`` or ``_apply``."""
        super().__init_subclass__(**options)
        own = cls.__dict__
        if "_apply" in own and "apply" not in own:
            cls.apply = own["_apply"]  # type: ignore[method-assign]
        elif "apply" in own and "_apply" not in own:
            cls._apply = own["apply"]  # type: ignore[method-assign]

    @abc.abstractmethod
    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelize ``module`` in place over ``device_mesh``; return it."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        return self.apply(module, device_mesh)

    def owner_among(self, ancestors: Sequence[Any]) -> Any:
        """The ancestor of a module that the style reads, by default the parent; None if there is none."""
        return next(iter(ancestors), None)

    def apply_within(self, owner: Any, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelize ``module`` inside the module ``owner``, or None; few styles read ``owner``."""
        del owner
        return self.apply(module, device_mesh)

    def problem_within(self, owner: Any, module: Any, size: int) -> str | None:
        """The reason why ``owner`` does not allow the style on ``size`` ranks, or None. Only used to check a plan."""
        del owner, module, size
        return None

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """Placements on the style's axis by relative path of the parameter. Only used to check a plan."""
        del module
        return {}

    def unsupported_reason(self, module: Any) -> str | None:
        """The reason why the style does not apply to this module, or None."""
        del module
        return None

    def inputs(self) -> Sequence[BoundaryLayout]:
        """Inputs that the module gets from the style, if they may be local tensors. Only used to complete a plan."""
        return ()

    def outputs(self) -> Sequence[BoundaryLayout]:
        """Outputs that the style passes to the module's caller; empty if unknown. Only used to complete a plan."""
        return ()


class LayerStyle(ParallelStyle):
    """A style that lays out the parameters of one linear or embedding layer and converts its input and output."""

    input_layouts: tuple[Any, ...]
    output_layouts: tuple[Any, ...]
    use_local_output: bool

    def unsupported_reason(self, module: Any) -> str | None:
        """The reason why the style does not apply, or None; it applies to linear and embedding layers."""
        platform = platform_of(module)
        if platform.is_linear_module(module) or platform.is_embedding_module(module):
            by = module.__dict__.get(_STYLED)
            return self._without_parameter(platform, module) if by is None else f"it is already parallelized by {by}"
        return self._other_kind(platform, module)

    def _other_kind(self, platform: Platform, module: Any) -> str:
        """The reason why a module of another kind is refused, with the name of the layer in it if it wraps one."""
        supported = f"{type(self).__name__} supports linear and embedding layers"
        layers = [
            path
            for path, child in platform.get_cells_and_names(module)
            if path and "." not in path and (platform.is_linear_module(child) or platform.is_embedding_module(child))
        ]
        kind = type(module)
        if len(layers) != 1:
            return f"{supported}, not {kind.__name__}"
        return (
            f"{supported}, not {kind.__module__}.{kind.__qualname__}, which wraps one: name its {layers[0]!r} in the "
            "plan, and lay out the other parameters that it contains"
        )

    def _without_parameter(self, platform: Platform, module: Any) -> str | None:
        """The reason why a parametrized layer is refused: its weight is computed, not a parameter."""
        own = {**platform.direct_parameters(module), **platform.direct_buffers(module)}
        computed = [name for name in self.placements_for(module) if name not in own]
        if not computed:
            return None
        return (
            f"{type(self).__name__} lays out parameters, but {computed[0]!r} of this {type(module).__name__} is "
            "computed from other parameters (as weight_norm, spectral_norm and pruning do); remove the "
            "parametrization first, with remove_parametrizations, remove_weight_norm or remove"
        )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Shard the parameters and register hooks that convert input and output.

        Raises:
            UnsupportedModuleError: (a NotImplementedError and ValueError) neither a linear nor an embedding layer.
        """
        reason = self.unsupported_reason(module)
        if reason is not None:
            raise UnsupportedModuleError(reason)
        platform = platform_of(module)
        for name, placement in self.placements_for(module).items():
            place_parameter(
                platform, module, name, device_mesh, on_axis(device_mesh, placement), src_data_rank=self.src_data_rank
            )
        module.__dict__[_STYLED] = type(self).__name__
        # Methods, not closures: a module is pickled with its hooks.
        axis, name = parallel_axis(device_mesh), first_argument(platform, module)
        features = self._features(platform, module) if platform.is_linear_module(module) else None
        before = partial(self._before, device_mesh, axis, name, features)
        platform.register_forward_pre_hook(module, before, with_kwargs=True)
        platform.register_forward_hook(module, partial(self._after, device_mesh, axis))
        return module

    def _before(
        self, mesh: DeviceMesh, axis: int, name: str, features: int | None, module: Any, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        platform = platform_of(module)
        boundary = Boundary(type(self).__name__, module, mesh, axis)

        def enter(value: Any) -> DTensor:
            boundary.require_tensor(value, name)
            known = {} if features is None else {len(value.shape) - 1: features}
            return self._enter(boundary, platform, module, value, name, known)

        return convert_first(boundary, name, args, kwargs, enter)

    def _enter(
        self, boundary: Boundary, platform: Platform, module: Any, value: Any, name: str, known: dict[int, int]
    ) -> DTensor:
        entered = boundary.enter(value, self._source(platform, module), name, known)
        return boundary.move(entered, self._computation_placement(platform, module), name)

    def _after(self, mesh: DeviceMesh, axis: int, module: Any, args: Args, output: Any) -> Any:
        del args
        boundary = Boundary(type(self).__name__, module, mesh, axis)
        moved = boundary.move(output, self.output_layouts[0], "output")
        return moved.to_local() if self.use_local_output else moved

    def outputs(self) -> Sequence[BoundaryLayout]:
        """The output of the layer."""
        return ((self.output_layouts[0], self.use_local_output),)

    def _features(self, platform: Platform, module: Any) -> int:
        """Global number of input features of a linear layer, whose weight is ``[out, in]``."""
        weight, _ = platform.layer_parameters(module)
        return int(platform.direct_parameters(module)[weight].shape[1])

    def _source(self, platform: Platform, module: Any) -> Any:
        """Layout of a plain input."""
        del platform, module
        return self.input_layouts[0]

    @abc.abstractmethod
    def _computation_placement(self, platform: Platform, module: Any) -> Placement:
        """Placement of the input that the layer computes on."""

    def __repr__(self) -> str:
        """Return the style with all its options."""
        return options(self, "input_layouts", "output_layouts", "use_local_output")


class ReplicatedStyle(ParallelStyle):
    """A style that replicates the parameters of any module and converts its input and output."""

    use_local_output: bool | None

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """Replicate for every parameter."""
        return dict.fromkeys(platform_of(module).parameters_dict(module), Replicate())

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Replicate parameters and buffers, and register hooks that convert input and output."""
        platform = platform_of(module)
        axis, name = parallel_axis(device_mesh), first_argument(platform, module)
        replicate_module(platform, module, device_mesh, src_data_rank=self.src_data_rank)
        platform.register_forward_pre_hook(module, partial(self._before, device_mesh, axis, name), with_kwargs=True)
        platform.register_forward_hook(module, partial(self._after, device_mesh, axis, name), with_kwargs=True)
        return module

    def _before(
        self, mesh: DeviceMesh, axis: int, name: str, cell: Any, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        boundary = Boundary(type(self).__name__, cell, mesh, axis)
        return convert_first(boundary, name, args, kwargs, lambda value: self._enter(boundary, value, name))

    def _after(self, mesh: DeviceMesh, axis: int, name: str, cell: Any, args: Args, kwargs: Kwargs, output: Any) -> Any:
        boundary = Boundary(type(self).__name__, cell, mesh, axis)
        local = self._returns_local(cell, args[0] if args else kwargs[name])
        return platform_of(cell).tree_map(lambda value: self._leave(boundary, value, local=local), output)

    def _returns_local(self, cell: Any, entered: Any) -> bool:
        """Whether the output of a call leaves as a local tensor; ``entered`` is what the module computed on."""
        del cell, entered
        return bool(self.use_local_output)

    @abc.abstractmethod
    def _enter(self, boundary: Boundary, value: Any, name: str) -> DTensor:
        """The first argument as the module computes on it."""

    @abc.abstractmethod
    def _leave(self, boundary: Boundary, value: Any, *, local: bool) -> Any:
        """One leaf of the output in the layout that the caller gets, as a DTensor or its local tensor."""


def options(style: Any, *names: str) -> str:
    """``ColwiseParallel(input_layouts=…, …)``."""
    return f"{type(style).__name__}({', '.join(f'{name}={getattr(style, name)}' for name in names)})"


def convert_first(
    edge: Boundary,
    name: str,
    args: Args,
    kwargs: Kwargs,
    enter: Callable[[Any], DTensor],
) -> tuple[Args, Kwargs]:
    """The call with its first argument converted, positional or keyword; the others pass unchanged.

    Raises:
        StyleError: (a ValueError) the module was called without a first argument.
    """
    if args:
        return (enter(args[0]), *args[1:]), kwargs
    if name in kwargs:
        return args, {**kwargs, name: enter(kwargs[name])}
    msg = f"{edge.module}: called without {name}, which {edge.style} converts"
    raise StyleError(msg)


def first_argument(platform: Platform, module: Any) -> str:
    """Name of the first parameter of the module's forward."""
    return next(iter(inspect.signature(platform.get_cell_construct(module)).parameters), "input")

"""Sharding plans: layouts of a module's parameters, inputs and outputs, by path."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import CONTAINERS, rebuild, tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.global_shape import layout_from_local_shapes
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.module import place_parameter, replicate_module
from hyper_parallel.core.dtensor.parameter_paths import (
    describe_nearest,
    owners_by_parameter,
    path_matches,
    replacing_parameters,
    untying_problems,
)
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.shard.custom.function_map import is_single_placement_spec
from hyper_parallel.errors import MeshMismatchError, PlacementError, PlanError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["ShardingPlan", "shard_module"]

_BY_PATH = ("plan", "input_plan", "output_plan", "return_local_tensor")
"""Options of a plan; the first names parameters, the others modules."""


@dataclass(frozen=True)
class ShardingPlan:
    """Layouts by path; a segment of a path may be a glob, and ``""`` is the module itself.

    Placements are written as objects (one per mesh axis) or aliases (one per dim).

    Attributes:
        plan: placements by path of a parameter or buffer: ``{"layers.*.fc1.weight": ("tp", "None")}``. The others
            are replicated.
        input_plan: layouts of inputs by path of the module: placements for its one tensor argument, a sequence
            with an entry per positional argument (None: unchanged), or a mapping by parameter name. A plain
            tensor is this rank's local shard; a DTensor is redistributed. Keys ``"fc1.input"`` and ``"input"`` mean
            ``"fc1"`` and ``""``, unless the module has modules of these names.
        output_plan: layouts of outputs by path of the module: placements, or a sequence or mapping nested like
            the output. Keys ``"fc1.output"`` and ``"output"`` mean ``"fc1"`` and ``""``, as for ``input_plan``.
        return_local_tensor: paths of modules that return local tensors.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    input_plan: Mapping[str, Any] | None = None
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None


def shard_module(module: Any, device_mesh: DeviceMesh | None, sharding_plan: ShardingPlan) -> Any:
    """Shard ``module`` in place as ``sharding_plan`` says.

    Args:
        module: the model; every parameter and buffer becomes a DTensor.
        device_mesh: the mesh; None means the current one.
        sharding_plan: the layouts by path.

    Returns:
        ``module``. A parameter under two paths remains one object.

    Raises:
        PlanError: (a ValueError) the plan does not match the module; raised before any weight is changed, with all
            problems: patterns that match nothing, placements that do not match the shape or mesh, and parameters tied
            under two layouts, or tied to one that an earlier call has sharded.
        TypeError: ``sharding_plan`` is not a :class:`ShardingPlan`, or a path in it is not a str.
    """
    if not isinstance(sharding_plan, ShardingPlan):
        msg = f"shard_module: sharding_plan must be a ShardingPlan, got {type(sharding_plan).__name__}"  # type: ignore[unreachable]
        raise TypeError(msg)
    plan: object = sharding_plan.plan  # callers may not be type-checked
    if not isinstance(plan, Mapping):
        msg = f"shard_module: plan must map paths to placements, got {type(plan).__name__}; {{}} replicates everything"
        raise TypeError(msg)
    for option in _BY_PATH:
        for path in getattr(sharding_plan, option) or ():
            if not isinstance(path, str):
                msg = f"shard_module: a path in {option} must be a str, got {path!r}"
                raise TypeError(msg)
    mesh = resolve_mesh(device_mesh)
    platform = platform_of(module)
    owners = dict(platform.get_cells_and_names(module))
    sharding_plan = replace(
        sharding_plan,
        input_plan=_by_module(sharding_plan.input_plan, "input", owners),
        output_plan=_by_module(sharding_plan.output_plan, "output", owners),
    )
    layouts = _checked_layouts(platform, module, mesh, sharding_plan)
    with replacing_parameters(platform, module) as ties:
        for path, layout in layouts.items():
            owner, _, name = path.rpartition(".")
            place_parameter(platform, owners[owner], name, mesh, layout)
            ties.restore()
    replicate_module(platform, module, mesh)
    local = sharding_plan.return_local_tensor or ()
    for path, cell in owners.items():
        boundary = _Boundary(platform, mesh, path or type(module).__name__)
        inputs = _entry(sharding_plan.input_plan, path)
        if inputs is not None:
            _lay_out_inputs(cell, boundary, inputs)
        outputs, plain = _entry(sharding_plan.output_plan, path), any(path_matches(pattern, path) for pattern in local)
        if outputs is not None or plain:
            _lay_out_outputs(cell, boundary, outputs, plain=plain)
    return module


def _by_module(plans: Mapping[str, Any] | None, word: str, cells: Iterable[str]) -> Mapping[str, Any] | None:
    """Return the entries by module path: ``word`` is removed from the end of a key that matches no module with it."""
    entries: dict[str, Any] = {}
    for pattern, entry in (plans or {}).items():
        owner, _, last = pattern.rpartition(".")
        path = owner if last == word and not any(path_matches(pattern, cell) for cell in cells) else pattern
        if path in entries:
            msg = f"shard_module: {word}_plan has two entries for {path!r}: {path!r} and {pattern!r}"
            raise PlanError(msg)
        entries[path] = entry
    return entries or None


# -- checking ----------------------------------------------------------------------------------------------------------


def _checked_layouts(platform: Platform, module: Any, mesh: DeviceMesh, plan: ShardingPlan) -> dict[str, Layout]:
    """Layout by path of every parameter and buffer that the plan names."""
    values = dict(_values(platform, module))
    cells = [path for path, _ in platform.get_cells_and_names(module)]
    problems: list[str] = []
    layouts: dict[str, Layout] = {}
    for pattern, placements in plan.plan.items():
        matches = [path for path in values if path_matches(pattern, path)]
        if not matches:
            nearest = describe_nearest(pattern, ["", *cells, *values])
            problems.append(f"plan: {pattern!r} matches no parameter; {nearest}")
        for path in matches:
            shape = tuple(values[path].shape)
            try:
                layouts[path] = Layout.place(mesh, placements, shape)
            except ValueError as error:
                problems.append(f"plan: {path} {list(shape)}: {error}")
    problems.extend(
        f"{option}: {pattern!r} names no module; {describe_nearest(pattern, cells)}"
        for option in _BY_PATH[1:]
        for pattern in getattr(plan, option) or ()
        if not any(path_matches(pattern, path) for path in cells)
    )
    problems.extend(_conflicts(platform, module, layouts))
    replaced = [
        (path, value)
        for path, value in values.items()
        if not isinstance(value, DTensor) or layouts.get(path, value.layout) is not value.layout
    ]
    problems.extend(f"plan: {text}" for text in untying_problems(platform, module, replaced))
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        head = f"shard_module: the plan does not match the module ({count}); no parameter was changed:"
        raise PlanError("\n  - ".join([head, *problems]))
    return layouts


def _values(platform: Platform, module: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter and buffer with its path."""
    for path, cell in platform.get_cells_and_names(module):
        for name, value in {**platform.direct_parameters(cell), **platform.direct_buffers(cell)}.items():
            yield (f"{path}.{name}" if path else name), value


def _conflicts(platform: Platform, module: Any, layouts: dict[str, Layout]) -> Iterator[str]:
    """Tied parameters whose paths have different layouts."""
    for slots in owners_by_parameter(platform, module).values():
        wanted = {path: layouts[path] for path, _, _ in slots if path in layouts}
        if len(set(wanted.values())) > 1:
            facts = ", ".join(f"{path} -> {list(layout.placements)}" for path, layout in wanted.items())
            yield f"plan: tied weight with conflicting layouts: {facts}"


def _entry(plans: Mapping[str, Any] | None, path: str) -> Any:
    """The entry of the last pattern that matches ``path``, or None."""
    entries = [entry for pattern, entry in (plans or {}).items() if path_matches(pattern, path)]
    return entries[-1] if entries else None


# -- hooks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Boundary:
    """The inputs and outputs of one module.

    Attributes:
        platform: the framework.
        mesh: the mesh.
        name: the module's path, for messages and the event log.
    """

    platform: Platform
    mesh: DeviceMesh
    name: str

    def place(self, value: Any, placements: Any, what: str) -> Any:
        """Return a tensor in these placements: a plain one is this rank's local shard, a DTensor is redistributed."""
        where = f"shard_module({self.name}): {what}"
        if isinstance(value, DTensor):
            if value.device_mesh is not self.mesh:
                msg = f"{where} is on {value.device_mesh!r}, but the module is on {self.mesh!r}"
                raise MeshMismatchError(msg)
            target = Layout.place(self.mesh, placements, tuple(value.shape))
            return value.redistribute_to(target, Cause(f"shard_module({self.name})", what))
        if not self.platform.is_tensor(value):
            msg = f"{where} must be a tensor to be laid out as {placements!r}, got {type(value).__name__}"
            raise PlacementError(msg)
        layout = Layout.place(self.mesh, placements, (0,) * len(value.shape))
        layout = layout_from_local_shapes(
            self.platform, value, layout, f"shard_module({self.name}): the local shards of {what}"
        )
        return self.platform.wrap(value, layout)

    def nested(self, value: Any, entry: Any, what: str) -> Any:
        """Return ``value`` with each tensor in the placements of ``entry``, nested like it; None keeps a tensor."""
        if entry is None:
            return value
        if isinstance(value, Mapping) and isinstance(entry, Mapping):
            unknown = [name for name in entry if name not in value]
            if unknown:
                msg = f"shard_module({self.name}): {what} has no {unknown[0]!r}; it has {', '.join(map(str, value))}"
                raise PlacementError(msg)
            return rebuild(
                value, {name: self.nested(item, entry.get(name), f"{what}[{name!r}]") for name, item in value.items()}
            )
        if isinstance(value, (list, tuple)):
            if is_single_placement_spec(entry) or isinstance(entry, Mapping) or len(entry) != len(value):
                msg = f"shard_module({self.name}): {what} is a sequence of {len(value)}, its entry is {entry!r}"
                raise PlacementError(msg)
            pairs = enumerate(zip(value, entry, strict=True))
            return rebuild(value, [self.nested(item, inner, f"{what}[{index}]") for index, (item, inner) in pairs])
        return self.place(value, entry, what)

    def plain(self, value: Any) -> Any:
        """Return ``value`` with each DTensor replaced by its local tensor."""
        return tree_map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, value, CONTAINERS)


def _lay_out_inputs(cell: Any, boundary: _Boundary, entry: Any) -> None:
    """Hook ``cell`` so that its inputs get the layouts in ``entry``."""
    platform = boundary.platform
    signature = inspect.signature(platform.get_cell_construct(cell))

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        for name, placements in _by_parameter(boundary, entry, bound, len(args)).items():
            bound.arguments[name] = boundary.nested(bound.arguments[name], placements, name)
        return bound.args, bound.kwargs

    platform.register_forward_pre_hook(cell, hook, with_kwargs=True)


def _by_parameter(boundary: _Boundary, entry: Any, bound: inspect.BoundArguments, count: int) -> dict[str, Any]:
    """The entries of one call, by parameter name."""
    names = list(bound.arguments)
    if isinstance(entry, Mapping):
        unknown = [name for name in entry if name not in names]
        if unknown:
            msg = f"shard_module({boundary.name}): input_plan names {unknown[0]!r}; the call has {', '.join(names)}"
            raise PlacementError(msg)
        return dict(entry)
    entries = [entry] if is_single_placement_spec(entry) else list(entry)
    if len(entries) != count:
        msg = (
            f"shard_module({boundary.name}): input_plan has {len(entries)} entries, the call {count} "
            "positional arguments"
        )
        raise PlacementError(msg)
    return dict(zip(names, entries, strict=False))


def _is_single_spec(entry: Any) -> bool:
    """Whether ``entry`` is a sequence of placements of one tensor."""
    return (
        isinstance(entry, (list, tuple))
        and len(entry) == 1
        and isinstance(entry[0], (list, tuple))
        and any(isinstance(item, Placement) for item in entry[0])
    )


def _lay_out_outputs(cell: Any, boundary: _Boundary, entry: Any, *, plain: bool) -> None:
    """Hook ``cell`` so that its outputs get the layouts in ``entry``; local tensors are returned if ``plain``."""

    def hook(_: Any, args: Any, output: Any) -> Any:
        del args
        one = not isinstance(output, (list, tuple, Mapping)) and _is_single_spec(entry)
        outputs = boundary.nested(output, entry[0] if one else entry, "output")
        return boundary.plain(outputs) if plain else outputs

    boundary.platform.register_forward_hook(cell, hook)

"""Converts inputs and outputs of parallel modules, and interprets the layouts that users give to styles.

A **spec** is what a user writes for one tensor: a placement for the style's own axis (on the others DTensors keep
theirs), or a layout over all axes: a tuple of one placement per mesh axis or of one alias per dim.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor, takes_no_part, without_elements
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.global_shape import layout_from_local_shapes, note_boundary_layout
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.parameter_paths import module_label
from hyper_parallel.core.dtensor.placements import Placement, Replicate, Shard, own_placements
from hyper_parallel.errors import (
    ArgumentTypeError,
    LayoutError,
    MeshError,
    MeshMismatchError,
    MixedTensorError,
    ShardMismatchError,
    StyleError,
)
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["AXIS", "Boundary", "Spec", "check_spec", "is_whole", "on_axis", "parallel_axis"]

AXIS = "tp"

Spec = Any
"""A placement, or a sequence of placements per mesh axis or of aliases per dim."""


def parallel_axis(mesh: DeviceMesh) -> int:
    """Return the mesh axis that styles act on: the only one, or the one called ``tp``.

    Raises:
        MeshError: (a ValueError) several axes, and none of them is called ``tp``.
    """
    if mesh.ndim == 1:
        return 0
    if AXIS in mesh.names:
        return mesh.names.index(AXIS)
    msg = (
        f"parallel styles act on the mesh axis {AXIS!r}, but {mesh!r} has several axes and none with "
        f"that name; name an axis {AXIS!r}, or pass a 1-D mesh: mesh[{mesh.names[-1]!r}]"
    )
    raise MeshError(msg)


def on_axis(mesh: DeviceMesh, placement: Placement) -> list[Placement]:
    """Placements of a parameter: ``placement`` on the style's axis, Replicate on the others."""
    axis = parallel_axis(mesh)
    return [placement if other == axis else Replicate() for other in range(mesh.ndim)]


def is_whole(spec: Spec) -> bool:
    """Return True if every rank has all of a tensor of this layout."""
    axes = spec if isinstance(spec, (list, tuple)) else (spec,)
    return all(axis in (Replicate(), None, "None") for axis in axes)


def check_spec(spec: Spec, option: str, style: str) -> Spec:
    """Return ``spec``, as a tuple if it is a sequence.

    Raises:
        ArgumentTypeError: (a TypeError) ``spec`` is neither a placement nor a sequence of placements or aliases.
    """
    spec = own_placements(spec)
    if isinstance(spec, Placement):
        return spec
    if (
        isinstance(spec, (list, tuple))
        and spec
        and all(isinstance(entry, (Placement, str, tuple)) or entry is None for entry in spec)
    ):
        return tuple(spec)
    msg = f"{style}: {option} must be a placement, one placement per mesh axis, or one alias per dim, got {spec!r}"
    raise ArgumentTypeError(msg)


@dataclass(frozen=True)
class Boundary:
    """The inputs and outputs of one module on one mesh.

    Attributes:
        style: the style's name, for the event log.
        cell: the module.
        mesh: the mesh.
        axis: the mesh axis that the style acts on.
    """

    style: str
    cell: Any
    mesh: DeviceMesh
    axis: int

    @property
    def module(self) -> str:
        """The module's path and type, for messages."""
        return module_label(self.cell)

    def enter(self, value: Any, spec: Spec, argument: str, known: Mapping[int, int] | None = None) -> DTensor:
        """Return ``value`` as a DTensor; a plain tensor is the local shard of layout ``spec``.

        Args:
            value: a plain tensor, or a DTensor of this mesh, which keeps its own layout.
            spec: layout of a plain tensor.
            argument: its name, for messages.
            known: global sizes by dim, if known from the module; ranks exchange the others.

        Raises:
            StyleError: (a ValueError) not a tensor.
            ShardMismatchError: (a ValueError) local shards that do not make one tensor.
            MixedTensorError: a plain tensor on a mesh of several axes, but ``spec`` describes only one.
            MeshMismatchError: a DTensor of another mesh.
            MeshLookupError: (a MeshError) a plain shard on a rank that is not in the mesh.
        """
        if isinstance(value, DTensor):
            return self._same_mesh(value, argument)
        platform = self._platform_of(value, argument)
        layout = self._layout(value, spec, argument)
        layout = self._sized(platform, value, layout, known or {}, argument)
        if takes_no_part(platform, self.mesh):
            return without_elements(value, platform, layout, f"{self.module}: {argument}", known=False)
        if layout.local_shape != tuple(value.shape):
            msg = (
                f"{self.module}: {argument} should be the shard {list(layout.local_shape)} of "
                f"{layout.notation(value.dtype)} on rank {self.mesh.rank}, got {list(value.shape)}"
            )
            if tuple(value.shape) == layout.shape:
                msg += f", the global shape; if every rank has all of it, its layout for {self.style} is Replicate()"
            raise ShardMismatchError(msg)
        return platform.wrap(value, layout)  # type: ignore[no-any-return]

    def enter_whole(self, value: Any, argument: str) -> DTensor:
        """Return ``value`` as a DTensor; a plain tensor is complete on every rank of the mesh.

        On a mesh of several axes the ranks compare its values (such as positions that forward computes): a plain shard
        of a batch would be mistaken for the complete batch.

        Raises:
            StyleError: (a ValueError) not a tensor.
            MixedTensorError: a plain tensor whose values differ between ranks.
            MeshMismatchError: a DTensor of another mesh.
        """
        if isinstance(value, DTensor):
            return self._same_mesh(value, argument)
        platform = self._platform_of(value, argument)
        layout = Layout.place(self.mesh, [Replicate()] * self.mesh.ndim, tuple(value.shape))
        if takes_no_part(platform, self.mesh):
            return without_elements(value, platform, layout, f"{self.module}: {argument}", known=False)
        if not self._is_equal_everywhere(platform, value):
            raise MixedTensorError(self._plain_message(value, Replicate(), argument))
        return platform.wrap(value, layout)  # type: ignore[no-any-return]

    def _is_equal_everywhere(self, platform: Platform, value: Any) -> bool:
        transport = platform.transport()
        if platform.is_meta(value) or transport.backend == "fake":  # a fake world has neither values nor other ranks
            return True
        array = platform.tensor_to_numpy(platform.detach(value))
        facts = (str(value.dtype), array.shape, zlib.crc32(array.tobytes()))
        return len(set(transport.all_gather_object(facts, self.mesh.ranks))) == 1

    def move(self, value: Any, spec: Spec, argument: str) -> DTensor:
        """Redistribute ``value`` to ``spec``; a single placement changes the style's axis only."""
        if not isinstance(value, DTensor):
            type_name = type(value).__name__
            msg = f"{self.module}: {argument} must be a DTensor for {self.style} to redistribute it, got {type_name}"
            raise StyleError(msg)
        target = self._target(value.layout, spec)
        if value._platform.transport().backend == "fake":
            note_boundary_layout(target)
        return value.redistribute_to(target, Cause(self.style, argument))

    def require_tensor(self, value: Any, argument: str) -> None:
        """Raise a StyleError unless ``value`` is a tensor."""
        self._platform_of(value, argument)

    def _platform_of(self, value: Any, argument: str) -> Platform:
        try:
            platform: Platform | None = platform_of(value)
        except TypeError:
            platform = None
        if platform is None or not platform.is_tensor(value):
            msg = f"{self.module}: {argument} must be a tensor, got {type(value).__name__}"
            raise StyleError(msg)
        return platform

    def _same_mesh(self, value: DTensor, argument: str) -> DTensor:
        if value.device_mesh is not self.mesh:
            msg = (
                f"{self.module}: {argument} is on {value.device_mesh!r}, but the module was parallelized on "
                f"{self.mesh!r}; distribute {argument} on the module's mesh"
            )
            raise MeshMismatchError(msg)
        return value

    # -- layouts -------------------------------------------------------------------------------------------------

    def _target(self, layout: Layout, spec: Spec) -> Layout:
        if not isinstance(spec, Placement):
            return Layout.place(self.mesh, spec, layout.shape or ())
        wanted = self._normal(spec, layout.ndim)
        return layout if layout.placement_on(self.axis) == wanted else layout.with_placement(self.axis, wanted)

    def _normal(self, spec: Placement, ndim: int) -> Placement:
        if not isinstance(spec, Shard):
            return spec
        if not -ndim <= spec.dim < ndim:
            msg = f"{self.module}: {self.style} asks for {spec!r} of a tensor of {ndim} dims"
            raise LayoutError(msg)
        return Shard(spec.dim % ndim)

    def _layout(self, value: Any, spec: Spec, argument: str) -> Layout:
        unknown_sizes = (0,) * len(value.shape)
        if not isinstance(spec, Placement):
            return Layout.place(self.mesh, spec, unknown_sizes)
        if self.mesh.ndim > 1:
            raise MixedTensorError(self._plain_message(value, spec, argument))
        return Layout.place(self.mesh, [self._normal(spec, len(unknown_sizes))], unknown_sizes)

    def _plain_message(self, value: Any, spec: Placement, argument: str) -> str:
        names = self.mesh.names
        others = ", ".join(name for axis, name in enumerate(names) if axis != self.axis)
        batch = ", ".join("Replicate()" if axis == self.axis else "Shard(0)" for axis in range(len(names)))
        whole = ", ".join(["Replicate()"] * len(names))
        return (
            f"{self.module}: {argument} is a plain tensor {list(value.shape)}; {spec!r} says how it is placed along "
            f"{names[self.axis]}, but not along {others} of {self.mesh!r}; pass use_local_output=False to the style "
            "that produced it or, if it is the batch, distribute it: hyper_parallel.distribute_tensor(batch, mesh, "
            f"[{batch}]); if every rank has the same values, such as an arange in forward, give the module "
            f"NoParallel(use_local_output=False), or a layout over all axes: ({whole})"
        )

    # -- sizes ---------------------------------------------------------------------------------------------------

    def _sized(self, platform: Platform, value: Any, layout: Layout, known: Mapping[int, int], argument: str) -> Layout:
        cut = {dim: size for dim, size in known.items() if layout.dim_axes[dim]}
        shape = [cut.get(dim, size) for dim, size in enumerate(value.shape)]
        return layout_from_local_shapes(
            platform, value, layout.with_shape(shape), f"{self.module}: the local shards of {argument}", cut.keys()
        )

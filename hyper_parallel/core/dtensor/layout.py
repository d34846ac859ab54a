"""Layouts: which mesh axes split which dims, in which order, and which axes hold partial values.

A layout is an immutable, interned value: layouts are compared by identity, and a layout serves as a cache key.
The order of splits is part of it: ``dim_axes[d]`` is the tuple of axes that split dim ``d``, outermost first. Every
split follows the ceil rule (``core/dtensor/README.md``); an inner axis splits the range that the outer axes leave.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from hyper_parallel._caches import register
from hyper_parallel._lazy import names_from_elsewhere
from hyper_parallel.core.dtensor.mesh import DeviceMesh, rebuild_mesh
from hyper_parallel.core.dtensor.placements import (
    DimAxes,
    Partial,
    Partials,
    Placement,
    Replicate,
    Shard,
    alias_of,
    are_placements,
    check_placement_count,
    from_aliases,
    from_placements,
    own_placements,
    partials_of,
    public_placements,
)
from hyper_parallel.errors import LayoutError, MeshMismatchError, PlacementError, notation

__all__ = ["Box", "Layout", "chunk_bounds", "parse_placements", "rebuilt_by"]

Box = tuple[tuple[int, int], ...]
"""A half-open index range ``(start, stop)`` per dim."""

# Weak references: layouts of sizes that never recur must not fill the memory.
_INTERNED: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()
# Layouts by the placements from which they were parsed. A full cache is emptied.
_PLACED: dict[Any, Layout] = {}
_MAX_PLACED = 16384
_LOCK = threading.Lock()
register("layouts", _INTERNED)
register("layouts by placements", _PLACED, lambda: _MAX_PLACED, has_layouts=True)


class DenseShape(NamedTuple):
    """Global shape and dense row-major strides, as frameworks represent them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Layout:
    """How a tensor is distributed over one mesh, with or without the tensor's global shape.

    ``Layout(mesh_shape, alias_name, rank_list)`` only describes a mesh. Call it to place a tensor:
    ``layout("dp", "None")``, ``layout(("dp", "tp"), "None")``, ``layout([Shard(0), Replicate()])``, or ``layout()``
    for a 0-d tensor. A list of placements does not determine the number of dims. Such a layout is completed when it is
    used as the placements of a tensor, or by ``with_shape``. Until then, and before the call, attributes that depend on
    the dims raise LayoutError.

    Args:
        mesh_shape: sizes of the axes.
        alias_name: names of the axes.
        rank_list: global ranks, row-major; ``0 … n-1`` by default.

    Attributes:
        mesh: the device mesh.
        dim_axes: per tensor dim the axes that split it, outermost first.
        placements: one placement per axis.
        partials: pairs of axis and reduction, in the order of the axes.
        shape: global sizes, or None if the layout is not that of a particular tensor.
        tensor_meta: ``shape`` with dense strides, or None without a shape; PyTorch's constructor reads this attribute.

    Raises:
        LayoutError: (a ValueError) ``rank_list`` does not have the number of ranks of the mesh.
    """

    __slots__ = (
        "__weakref__", "_is_placed", "_local_shape", "_unresolved_placements", "dim_axes", "mesh", "partials",
        "placements", "shape", "tensor_meta",
    )  # fmt: skip

    mesh: DeviceMesh
    dim_axes: DimAxes
    partials: Partials
    shape: tuple[int, ...] | None
    placements: tuple[Placement, ...]
    tensor_meta: DenseShape | None
    _local_shape: tuple[int, ...] | None
    _is_placed: bool
    _unresolved_placements: tuple[Placement, ...] | None

    def __new__(  # noqa: PYI034 - layouts are interned, and nobody subclasses them
        cls, mesh_shape: Sequence[int], alias_name: Sequence[str], rank_list: Sequence[int] | None = None
    ) -> Layout:
        """Return an unplaced layout; call it to place a tensor."""
        shape = tuple(mesh_shape)
        size = 1
        for axis_size in shape:
            size *= axis_size
        ranks = tuple(range(size)) if rank_list is None else tuple(rank_list)
        if len(ranks) != size:
            msg = f"Layout: mesh_shape {shape} needs {size} ranks, rank_list has {len(ranks)}"
            raise LayoutError(msg)
        return cls.from_device_mesh(DeviceMesh.abstract("cpu", shape, ranks, tuple(alias_name)))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Layout:
        """Return an unplaced layout over ``mesh``."""
        return _intern(mesh, None, (), None)

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        dim_axes: Sequence[Sequence[int]],
        partials: Sequence[tuple[int, str]] = (),
        shape: Sequence[int] | None = None,
    ) -> Layout:
        """Return the layout with these attributes, which are not checked.

        Args:
            mesh: the device mesh.
            dim_axes: per tensor dim the axes that split it, outermost first.
            partials: pairs of axis and reduction.
            shape: global sizes, or None.
        """
        return _intern(
            mesh,
            tuple(tuple(axes) for axes in dim_axes),
            tuple(sorted(partials)),
            None if shape is None else tuple(shape),
        )

    @classmethod
    def place(cls, mesh: DeviceMesh, placements: Any, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor with these placements.

        Args:
            mesh: the device mesh.
            placements: one placement per axis, one alias per dim, or a layout.
            shape: global sizes of the tensor.

        Raises:
            LayoutError: (a ValueError) placements that do not fit the mesh or the tensor.
            MeshMismatchError: a layout of another mesh.
        """
        key = (mesh, tuple(placements), tuple(shape)) if isinstance(placements, (list, tuple)) else None
        try:
            layout = _PLACED.get(key)
        except TypeError:  # unhashable placements, which the parser rejects with the reason
            key = layout = None
        if layout is None:
            dim_axes, partials = parse_placements(mesh, placements, len(shape))
            layout = _intern(mesh, dim_axes, partials, tuple(shape))
            if key is not None:
                with _LOCK:
                    if len(_PLACED) >= _MAX_PLACED:
                        _PLACED.clear()
                    _PLACED[key] = layout
        return layout

    # -- placement -----------------------------------------------------------------------------------------------

    def __call__(self, *aliases: Any) -> Layout:
        """Place a tensor on the mesh.

        Args:
            aliases: one alias per dim, or one list of placements; a list does not determine the number of dims.

        Raises:
            LayoutError: (a ValueError) aliases or placements that do not fit the mesh.
        """
        aliases = own_placements(aliases)
        if len(aliases) == 1 and isinstance(aliases[0], (list, tuple)) and are_placements(aliases[0]):
            placements = tuple(aliases[0])
            check_placement_count(self.mesh, placements)
            return _intern(self.mesh, None, partials_of(placements), None, placements)
        dim_axes, partials = parse_placements(self.mesh, aliases, len(aliases))
        return _intern(self.mesh, dim_axes, partials, None)

    def of_ndim(self, ndim: int) -> Layout:
        """Return this layout for a tensor of ``ndim`` dims.

        Raises:
            LayoutError: the layout has a different number of dims, or is unplaced.
        """
        if not self._is_placed and self._unresolved_placements is not None:
            return _intern(self.mesh, *from_placements(self.mesh, self._unresolved_placements, ndim), None)
        if self.ndim != ndim:
            msg = f"layout {self!r} does not place a tensor of {ndim} dims"
            raise PlacementError(msg)
        return self

    def with_shape(self, shape: Sequence[int] | None) -> Layout:
        """Return the same layout with another global shape, or with none."""
        if not self._is_placed and self._unresolved_placements is not None:
            return self if shape is None else self.of_ndim(len(shape)).with_shape(shape)
        return _intern(self.mesh, self.dim_axes, self.partials, None if shape is None else tuple(shape))

    def with_axes(self, dim_axes: DimAxes, partials: Partials) -> Layout:
        """Return the layout of the same mesh and shape with other axes; ``partials`` are in the order of the axes."""
        return _intern(self.mesh, dim_axes, partials, self.shape)

    def with_placement(self, axis: int, placement: Placement) -> Layout:
        """Return the same layout with another placement on ``axis``; a shard becomes the innermost split of its dim."""
        dims = [tuple(other for other in axes if other != axis) for axes in self.dim_axes]
        partials = [pair for pair in self.partials if pair[0] != axis]
        if isinstance(placement, Shard):
            dims[placement.dim] = (*dims[placement.dim], axis)
        elif isinstance(placement, Partial):
            partials.append((axis, placement.reduce_op))
        return _intern(self.mesh, tuple(dims), tuple(sorted(partials)), self.shape)

    # -- properties ----------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.dim_axes)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh's axes."""
        return self.mesh.shape

    @property
    def alias_name(self) -> tuple[str, ...]:
        """Names of the mesh's axes."""
        return self.mesh.names

    @property
    def rank_list(self) -> tuple[int, ...]:
        """Global ranks of the mesh, row-major."""
        return self.mesh.ranks

    def get_split_id(self, dim: int) -> int:
        """Return which of the shards of ``dim`` this rank holds, counted along the dim."""
        at, index = self.mesh.own_coordinate(), 0
        for axis in self.dim_axes[dim]:
            index = index * self.mesh.shape[axis] + at[axis]
        return index

    def repeat_num(self) -> int:
        """Return the number of ranks that hold each shard: the product of the sizes of the axes that split no dim."""
        splitting = {axis for axes in self.dim_axes for axis in axes}
        return math.prod(size for axis, size in enumerate(self.mesh.shape) if axis not in splitting)

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the complete tensor."""
        return not self.partials and not any(self.dim_axes)

    @property
    def alias_placements(self) -> tuple[Any, ...]:
        """Per dim the name of its axis, a tuple of names, or ``"None"``. Aliases do not express Partial axes."""
        return tuple(alias_of(tuple(self.mesh.names[axis] for axis in axes)) for axes in self.dim_axes)

    @property
    def tensor_map(self) -> tuple[Any, ...]:
        """Per dim the axis that splits it, counted from the right; -1 for none, a tuple for several."""
        last = self.mesh.ndim - 1
        mapped = [tuple(last - axis for axis in axes) for axes in self.dim_axes]
        return tuple(-1 if not axes else axes[0] if len(axes) == 1 else axes for axes in mapped)

    def is_partial(self, axis: int | str | None = None) -> bool:
        """True if any axis, or the axis ``axis``, holds partial values."""
        if axis is None:
            return bool(self.partials)
        return any(partial_axis == self.mesh.axis(axis) for partial_axis, _ in self.partials)

    def get_partial_by_dev_id(self, axis: int | str) -> str | None:
        """Return the reduction of the partial values along ``axis``, or None; the name is MindSpore's."""
        index = self.mesh.axis(axis)
        return next((op for partial_axis, op in self.partials if partial_axis == index), None)

    def placement_on(self, axis: int) -> Placement:
        """Return the placement on ``axis``, ignoring the order of splits: Replicate, ``Shard(dim)`` or Partial."""
        for partial_axis, op in self.partials:
            if partial_axis == axis:
                return Partial(op)
        for dim, axes in enumerate(self.dim_axes):
            if axis in axes:
                return Shard(dim)
        return Replicate()

    def shard_count(self, dim: int) -> int:
        """Number of shards of dim ``dim``."""
        count = 1
        for axis in self.dim_axes[dim]:
            count *= self.mesh.shape[axis]
        return count

    def get_global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the layout's global shape; if it has none, the one of even shards of ``local_shape``."""
        if self.shape is not None:
            return self.shape
        if not self._is_placed:
            return self.of_ndim(len(local_shape)).get_global_shape(local_shape)
        return tuple(size * self.shard_count(dim) for dim, size in enumerate(local_shape))

    # -- boxes ---------------------------------------------------------------------------------------------------

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes that the current rank holds; outside of the mesh all are 0, and a tensor without dims gets one."""
        if self._local_shape is None:
            at = self.mesh.coordinate
            self._local_shape = (0,) * max(self.ndim, 1) if at is None else self.local_shape_at(at)
        return self._local_shape

    def local_shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Sizes that the rank at ``coordinate`` holds."""
        return tuple(stop - start for start, stop in self.box_at(coordinate))

    def local_box(self, rank: int | None = None) -> Box:
        """Half-open index range per dim that global rank ``rank`` (default: the current one) holds."""
        return self.box_at(self.mesh.own_coordinate() if rank is None else self.mesh.coordinate_of(rank))

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """Half-open index range per dim of the rank at ``coordinate``."""
        dim_axes = self.dim_axes
        if self.shape is None:
            msg = "layout has no global shape; use with_shape(...) first"
            raise LayoutError(msg)
        box = []
        for size, axes in zip(self.shape, dim_axes, strict=True):
            start, stop = 0, size
            for axis in axes:
                low, high = chunk_bounds(stop - start, self.mesh.shape[axis], coordinate[axis])
                start, stop = start + low, start + high
            box.append((start, stop))
        return tuple(box)

    # -- printing, pickling, copying -----------------------------------------------------------------------------

    def notation(self, dtype: object | None = None) -> str:
        """Return the layout in the notation of messages, ``f32[16@dp, 8@tp] + Partial(sum)@ep``."""
        names = self.mesh.names
        shape = self.shape if self.shape is not None else tuple("?" for _ in self.dim_axes)
        return notation(
            dtype,
            shape,  # type: ignore[arg-type]
            [[names[axis] for axis in axes] for axes in self.dim_axes],
            [(op, names[axis]) for axis, op in self.partials],
        )

    def __repr__(self) -> str:
        """Return the notation and the mesh."""
        if self._is_placed:
            return f"Layout({self.notation()} on {self.mesh!r})"
        return (
            f"Layout({self.mesh!r})"
            if self._unresolved_placements is None
            else f"Layout({list(self._unresolved_placements)} on {self.mesh!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value."""
        if self._is_placed:
            return (_intern, (self.mesh, self.dim_axes, self.partials, self.shape))
        return (
            _intern,
            (self.mesh, None, partials_of(self._unresolved_placements or ()), None, self._unresolved_placements),
        )

    def __copy__(self) -> Layout:
        """Return the layout itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        """Return the layout itself, which is immutable."""
        return self

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every misspelt attribute

        def __getattr__(self, name: str) -> Any:
            """Set the placements, which are computed on first use, or explain why an unplaced layout lacks a name."""
            if name == "placements" and self._is_placed:
                self.placements = public_placements(self.mesh, self.dim_axes, self.partials)
                return self.placements
            if name not in _PLACED_ATTRIBUTES:
                fix = "; layouts are immutable: layout(placements) returns a new one" if name in _OF_DRAFTS else ""
                msg = f"{type(self).__name__!r} object has no attribute {name!r}{fix}"
                raise AttributeError(msg)
            if self._unresolved_placements is None:
                fix = 'describes only a mesh; call it first to place a tensor: layout("None", ...), an alias per dim'
            else:
                fix = "does not know the number of dims of its tensor; call layout.with_shape(...) first"
            msg = f"layout {self!r} {fix}"
            raise LayoutError(msg)


_PLACED_ATTRIBUTES = ("dim_axes", "partials", "placements")
_OF_DRAFTS = ("placement_to_tensor_map", "reset_partial", "set_placements")
"""Methods of the mutable layouts of earlier releases, which programs may still call."""


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of shard ``index`` of ``size`` elements in ``parts`` shards, by the ceil rule.

    Every shard has ``ceil(size / parts)`` elements, the last ones fewer or none, as in ``torch.chunk``.
    """
    chunk = -(-size // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def parse_placements(mesh: DeviceMesh, placements: Any, ndim: int) -> tuple[DimAxes, Partials]:
    """Read placements, aliases or a layout for a tensor of ``ndim`` dims.

    Returns:
        the axes that split each dim, and the partial axes.

    Raises:
        LayoutError: (a ValueError) wrong count, a dim or axis that does not exist, an axis used twice.
        MeshMismatchError: a layout of another mesh.
    """
    if isinstance(placements, Layout):
        _check_mesh(mesh, placements)
        placed = placements.of_ndim(ndim)
        return placed.dim_axes, placed.partials
    placements = own_placements(placements)
    if isinstance(placements, Placement):
        placements = (placements,)
    if are_placements(placements):
        return from_placements(mesh, tuple(placements), ndim)
    if not isinstance(placements, (list, tuple)):
        msg = (
            f"placements: got {placements!r}; give one placement per mesh axis, such as "
            f"[{', '.join(['Replicate()'] * mesh.ndim)}], or one alias per dim"
        )
        raise PlacementError(msg)
    return from_aliases(mesh, tuple(placements), ndim)


def _check_mesh(mesh: DeviceMesh, layout: Layout) -> None:
    """Check that the layout has the axes of ``mesh``; device and rank of ``Layout(mesh_shape, names)`` do not count."""
    own = layout.mesh
    if own is not mesh and (own.shape, own.names, own.ranks) != (mesh.shape, mesh.names, mesh.ranks):
        msg = f"placements: the layout is on {own!r}, the tensor on {mesh!r}; give a layout of the tensor's mesh"
        raise MeshMismatchError(msg)


def rebuilt_by() -> tuple[Callable[..., Any], ...]:
    """The functions that unpickling a layout calls; they have no side effects, so a safe loader may allow them."""
    return (_intern, rebuild_mesh)


def _intern(
    mesh: DeviceMesh,
    dim_axes: DimAxes | None,
    partials: Partials,
    shape: tuple[int, ...] | None,
    unresolved_placements: tuple[Placement, ...] | None = None,
) -> Layout:
    key = (mesh, dim_axes, partials, shape, unresolved_placements)
    layout = _INTERNED.get(key)
    if layout is None:
        with _LOCK:  # another thread may have built it
            layout = _INTERNED[key] = _INTERNED.get(key) or _new(*key)
    return layout


def _new(
    mesh: DeviceMesh,
    dim_axes: DimAxes | None,
    partials: Partials,
    shape: tuple[int, ...] | None,
    unresolved_placements: tuple[Placement, ...] | None,
) -> Layout:
    layout = object.__new__(Layout)
    layout.mesh, layout.shape, layout._unresolved_placements = mesh, shape, unresolved_placements
    layout._is_placed = dim_axes is not None
    if dim_axes is not None:
        layout.dim_axes, layout.partials = dim_axes, partials
    elif unresolved_placements is not None:
        layout.placements, layout.partials = unresolved_placements, partials
    # Computed here and not on first use, so that dispatch notices a tensor that was given as a size.
    layout.tensor_meta = None if shape is None else DenseShape(shape, _dense_strides(shape))
    layout._local_shape = None
    return layout


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every misspelt name
    __getattr__ = names_from_elsewhere(__name__)

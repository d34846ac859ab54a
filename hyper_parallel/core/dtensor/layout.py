"""Layouts: which mesh axes split which dims, in which order, and which axes hold summands.

A layout is an immutable, interned value: comparing two is comparing identities, and a layout is its own cache key.
Order is data: ``dim_axes[d]`` is the tuple of axes that split dim ``d``, outermost first. Every split follows the
ceil rule (``core/dtensor/README.md``), nested: an inner axis splits the chunk that the outer ones left.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import (
    DimAxes,
    Partial,
    Partials,
    Placement,
    Replicate,
    Shard,
    alias_of,
    are_placements,
    check_count,
    from_aliases,
    from_placements,
    partials_of,
    public_placements,
)
from hyper_parallel.errors import LayoutError, MeshMismatchError, PlacementError, notation

__all__ = ["Box", "Layout", "chunk_bounds", "parse_placements"]

Box = tuple[tuple[int, int], ...]

# Weak: "equal layouts are one object" has to hold for those that somebody still holds, and sizes that never come again
# must not fill the memory.
_INTERNED: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()
# Spellings read before; forgotten all at once, which costs reading them once more.
_PLACED: dict[Any, Layout] = {}
_MOST_PLACED = 16384
_LOCK = threading.Lock()


class TensorMeta(NamedTuple):
    """Global shape and dense row-major strides, as frameworks ask for them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Layout:
    """A placement of every dim and axis on one mesh, with or without a global shape.

    ``Layout(mesh_shape, alias_name, rank_list)`` names a mesh only; calling it places a tensor on it:
    ``layout("dp", "None")``, ``layout(("dp", "tp"), "None")``, ``layout([Shard(0), Replicate()])`` or ``layout()``
    (a 0-d tensor). One placement per axis does not tell the number of dims: that layout waits for its tensor, and is
    placed once it is given as the placements of one, or a shape with ``with_shape``. Until then, as before the call,
    what depends on the dims is a LayoutError.

    Args:
        mesh_shape: sizes of the axes.
        alias_name: names of the axes.
        rank_list: global ranks, row-major; ``0 … n-1`` by default.

    Attributes:
        mesh: the device mesh.
        dim_axes: per tensor dim the axes that split it, outermost first.
        placements: one placement per axis.
        partials: pairs of axis and reduction, in the order of the axes.
        shape: global sizes, or None when no tensor is attached.
    """

    __slots__ = (
        "__weakref__", "_is_placed", "_local_shape", "_waiting", "dim_axes", "mesh", "partials", "placements", "shape",
        "tensor_meta",
    )  # fmt: skip

    mesh: DeviceMesh
    dim_axes: DimAxes
    partials: Partials
    shape: tuple[int, ...] | None
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta | None
    _local_shape: tuple[int, ...] | None
    _is_placed: bool
    _waiting: tuple[Placement, ...] | None

    def __new__(  # noqa: PYI034 - layouts are interned, and nobody subclasses them
        cls, mesh_shape: Sequence[int], alias_name: Sequence[str], rank_list: Sequence[int] | None = None
    ) -> Layout:
        """An unplaced layout: call it to place a tensor."""
        shape = tuple(mesh_shape)
        size = 1
        for axis_size in shape:
            size *= axis_size
        ranks = tuple(range(size)) if rank_list is None else tuple(rank_list)
        if len(ranks) != size:
            msg = f"Layout: mesh_shape {shape} needs {size} ranks, rank_list has {len(ranks)}"
            raise LayoutError(msg)
        return cls.from_device_mesh(DeviceMesh.grid("cpu", shape, ranks, tuple(alias_name)))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Layout:
        """An unplaced layout over ``mesh``."""
        return _intern(mesh, None, (), None)

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        dim_axes: Sequence[Sequence[int]],
        partials: Sequence[tuple[int, str]] = (),
        shape: Sequence[int] | None = None,
    ) -> Layout:
        """The one layout of these parts; the parts are trusted."""
        return _intern(
            mesh,
            tuple(tuple(axes) for axes in dim_axes),
            tuple(sorted(partials)),
            None if shape is None else tuple(shape),
        )

    @classmethod
    def place(cls, mesh: DeviceMesh, placements: Any, shape: Sequence[int]) -> Layout:
        """The layout of a tensor of global ``shape`` under either spelling of its placements."""
        key = (mesh, tuple(placements), tuple(shape)) if isinstance(placements, (list, tuple)) else None
        try:
            found = _PLACED.get(key)
        except TypeError:  # an unhashable spelling: let the parser say what is wrong with it
            key = found = None
        if found is None:
            dim_axes, partials = parse_placements(mesh, placements, len(shape))
            found = _intern(mesh, dim_axes, partials, tuple(shape))
            if key is not None:
                with _LOCK:
                    if len(_PLACED) >= _MOST_PLACED:
                        _PLACED.clear()
                    _PLACED[key] = found
        return found

    # -- placing -------------------------------------------------------------------------------------------------

    def __call__(self, *aliases: Any) -> Layout:
        """Place a tensor: alias per dim, or one list of placements, which waits for the tensor's number of dims."""
        if len(aliases) == 1 and isinstance(aliases[0], (list, tuple)) and are_placements(aliases[0]):
            waiting = tuple(aliases[0])
            check_count(self.mesh, waiting)
            return _intern(self.mesh, None, partials_of(waiting), None, waiting)
        dim_axes, partials = parse_placements(self.mesh, aliases, len(aliases))
        return _intern(self.mesh, dim_axes, partials, None)

    def of_ndim(self, ndim: int) -> Layout:
        """This layout for a tensor of ``ndim`` dims: itself, or what a list of placements becomes.

        Raises:
            LayoutError: it is of another number of dims, or was never called.
        """
        if not self._is_placed and self._waiting is not None:
            return _intern(self.mesh, *from_placements(self.mesh, self._waiting, ndim), None)
        if self.ndim != ndim:
            msg = f"layout {self!r} does not place a tensor of {ndim} dims"
            raise PlacementError(msg)
        return self

    def with_shape(self, shape: Sequence[int] | None) -> Layout:
        """The same placement with another global shape."""
        if not self._is_placed and self._waiting is not None:
            return self if shape is None else self.of_ndim(len(shape)).with_shape(shape)
        return _intern(self.mesh, self.dim_axes, self.partials, None if shape is None else tuple(shape))

    def with_placement(self, axis: int, placement: Placement) -> Layout:
        """The same layout with ``axis`` placed anew; a new shard splits inside the axes already there."""
        dims = [tuple(a for a in axes if a != axis) for axes in self.dim_axes]
        partials = [pair for pair in self.partials if pair[0] != axis]
        if isinstance(placement, Shard):
            dims[placement.dim] = (*dims[placement.dim], axis)
        elif isinstance(placement, Partial):
            partials.append((axis, placement.reduce_op))
        return _intern(self.mesh, tuple(dims), tuple(sorted(partials)), self.shape)

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.dim_axes)

    @property
    def is_replicated(self) -> bool:
        """True when every rank holds the whole tensor."""
        return not self.partials and not any(self.dim_axes)

    @property
    def alias_placements(self) -> tuple[Any, ...]:
        """Per dim the name of its axis, a tuple of names, or ``"None"``; the spelling does not show Partial axes."""
        return tuple(alias_of(tuple(self.mesh.names[axis] for axis in axes)) for axes in self.dim_axes)

    @property
    def tensor_map(self) -> tuple[Any, ...]:
        """Per dim the axis counted from the right, -1 where whole, a tuple where several axes split it."""
        last = self.mesh.ndim - 1
        mapped = [tuple(last - axis for axis in axes) for axes in self.dim_axes]
        return tuple(-1 if not axes else axes[0] if len(axes) == 1 else axes for axes in mapped)

    def is_partial(self, axis: int | str | None = None) -> bool:
        """True when any axis, or the given one, holds summands."""
        if axis is None:
            return bool(self.partials)
        return any(held == self.mesh.axis(axis) for held, _ in self.partials)

    def get_partial_by_dev_id(self, axis: int | str) -> str | None:
        """Reduction that ``axis`` still owes, or None."""
        wanted = self.mesh.axis(axis)
        return next((op for held, op in self.partials if held == wanted), None)

    def placement_on(self, axis: int) -> Placement:
        """What ``axis`` does, order left out: Replicate, ``Shard(dim)`` or Partial."""
        for held, op in self.partials:
            if held == axis:
                return Partial(op)
        for dim, axes in enumerate(self.dim_axes):
            if axis in axes:
                return Shard(dim)
        return Replicate()

    def shard_count(self, dim: int) -> int:
        """Number of pieces that dim ``dim`` is cut into."""
        count = 1
        for axis in self.dim_axes[dim]:
            count *= self.mesh.shape[axis]
        return count

    def get_global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Global shape of even shards of ``local_shape``; the attached shape, where there is one, is returned as is."""
        if self.shape is not None:
            return self.shape
        if not self._is_placed:
            return self.of_ndim(len(local_shape)).get_global_shape(local_shape)
        return tuple(size * self.shard_count(dim) for dim, size in enumerate(local_shape))

    # -- boxes ---------------------------------------------------------------------------------------------------

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes that the current rank holds."""
        if self._local_shape is None:
            self._local_shape = tuple(stop - start for start, stop in self.box_at(self.mesh._member()))  # noqa: SLF001
        return self._local_shape

    def local_shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Sizes that the rank at ``coordinate`` holds."""
        return tuple(stop - start for start, stop in self.box_at(coordinate))

    def local_box(self, rank: int | None = None) -> Box:
        """Half-open index range per dim that global rank ``rank`` (default: the current one) holds."""
        at = self.mesh._member() if rank is None else self.mesh.coordinate_of(rank)  # noqa: SLF001
        return self.box_at(at)

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

    # -- value ---------------------------------------------------------------------------------------------------

    def notation(self, dtype: object | None = None) -> str:
        """``f32[16@dp, 8@tp] + Partial(sum)@ep``."""
        names = self.mesh.names
        shape = self.shape if self.shape is not None else tuple("?" for _ in self.dim_axes)
        return notation(
            dtype,
            shape,  # type: ignore[arg-type]
            [[names[axis] for axis in axes] for axes in self.dim_axes],
            [(op, names[axis]) for axis, op in self.partials],
        )

    def __repr__(self) -> str:
        """The one notation, on the mesh."""
        if self._is_placed:
            return f"Layout({self.notation()} on {self.mesh!r})"
        return f"Layout({self.mesh!r})" if self._waiting is None else f"Layout({list(self._waiting)} on {self.mesh!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value."""
        if self._is_placed:
            return (_intern, (self.mesh, self.dim_axes, self.partials, self.shape))
        return (_intern, (self.mesh, None, partials_of(self._waiting or ()), None, self._waiting))

    def __copy__(self) -> Layout:
        """Immutable: the layout itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        """Immutable: the layout itself."""
        return self

    if not TYPE_CHECKING:  # or every misspelt attribute would have a type

        def __getattr__(self, name: str) -> Any:
            """What an unplaced layout does not know is left unset, so that a placed one pays for no check."""
            if name not in _UNKNOWN:
                msg = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(msg)
            if self._waiting is None:
                fix = 'names a mesh only; call it first to place a tensor: layout("None", ...), an alias per dim'
            else:
                fix = "waits for the number of dims of its tensor; say layout.with_shape(...) first"
            msg = f"layout {self!r} {fix}"
            raise LayoutError(msg)


_UNKNOWN = ("dim_axes", "partials", "placements")


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Range of chunk ``index`` when ``size`` is cut into ``parts`` by the ceil rule; the last chunks may be empty."""
    chunk = -(-size // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def parse_placements(mesh: DeviceMesh, placements: Any, ndim: int) -> tuple[DimAxes, Partials]:
    """Read either public spelling of placements for a tensor of ``ndim`` dims.

    Raises:
        LayoutError: (a ValueError) wrong count, a dim or axis that does not exist, an axis used twice.
        MeshMismatchError: a layout of another mesh.
    """
    if isinstance(placements, Layout):
        _check_mesh(mesh, placements)
        placed = placements.of_ndim(ndim)
        return placed.dim_axes, placed.partials
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
    """The layout's axes are those of ``mesh``; one of ``Layout(mesh_shape, names)`` knows no device and no viewer."""
    own = layout.mesh
    if own is not mesh and (own.shape, own.names, own.ranks) != (mesh.shape, mesh.names, mesh.ranks):
        msg = f"placements: the layout lives on {own!r}, the tensor on {mesh!r}; give a layout of the tensor's mesh"
        raise MeshMismatchError(msg)


def _intern(
    mesh: DeviceMesh,
    dim_axes: DimAxes | None,
    partials: Partials,
    shape: tuple[int, ...] | None,
    waiting: tuple[Placement, ...] | None = None,
) -> Layout:
    key = (mesh, dim_axes, partials, shape, waiting)
    found = _INTERNED.get(key)
    if found is None:
        with _LOCK:  # another thread may have come first
            found = _INTERNED[key] = _INTERNED.get(key) or _new(*key)
    return found


def _new(
    mesh: DeviceMesh,
    dim_axes: DimAxes | None,
    partials: Partials,
    shape: tuple[int, ...] | None,
    waiting: tuple[Placement, ...] | None,
) -> Layout:
    made = object.__new__(Layout)
    made.mesh, made.shape, made._waiting = mesh, shape, waiting
    made._is_placed = dim_axes is not None
    if dim_axes is not None:
        made.dim_axes, made.partials = dim_axes, partials
        made.placements = public_placements(mesh, dim_axes, partials)
    elif waiting is not None:
        made.placements, made.partials = waiting, partials
    made.tensor_meta = None if shape is None else TensorMeta(shape, _dense(shape))
    made._local_shape = None
    return made


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

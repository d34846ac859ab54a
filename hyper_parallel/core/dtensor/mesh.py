"""Device meshes: ranks arranged in named axes.

A mesh is an immutable, interned value: two meshes with the same device type, shape, names and ranks, used on the same
rank, are one object. The rank is part of the value. So a coordinate is a plain attribute, and whatever is built on a
mesh (layouts, transitions) may be cached by identity, also where many ranks are in one process.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hyper_parallel._caches import empty_layout_caches, register
from hyper_parallel.errors import MeshError, MeshLookupError
from hyper_parallel.platform.select import current_platform
from hyper_parallel.transport.base import active_transport

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # of the standard library from Python 3.11 on

__all__ = ["DEVICE_TYPES", "DeviceMesh", "common_mesh", "get_current_mesh", "init_device_mesh", "rebuild_mesh"]

DEVICE_TYPES = ("cpu", "cuda", "npu")
"""Device types that a rank may compute on."""

_MAX_PRINTED_RANKS = 64
# The references are weak, but caches keyed by layout keep meshes alive; with many meshes, those caches are emptied.
_INTERNED: WeakValueDictionary[tuple[Any, ...], DeviceMesh] = WeakValueDictionary()
_MAX_MESHES = 256
_LOCK = threading.Lock()
register("meshes", _INTERNED)
_CURRENT: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("hyper_parallel_mesh", default=())


class DeviceMesh:
    """Ranks arranged in a grid of named axes.

    Args:
        device_type: ``cpu``, ``cuda`` or ``npu``.
        mesh: nested sequence (or array) of global ranks; every rank at most once.
        mesh_dim_names: one name per axis; without names, axes are named ``"0"``, ``"1"``, ….

    Attributes:
        device_type: device of the local tensors.
        shape: sizes of the axes.
        ranks: global ranks, row-major.
        mesh_dim_names: names of the axes, or None.
        rank: the global rank on which the mesh is in use.
        coordinate: its position, or None if it is not in the mesh.

    Raises:
        MeshError: (a ValueError and RuntimeError) unknown device, ragged rows, duplicate ranks or names,
            ranks outside the world.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    names: tuple[str, ...]
    rank: int
    coordinate: tuple[int, ...] | None
    _ranks_along_cache: dict[tuple[int, ...], tuple[int, ...]]
    _positions: dict[int, int] | None

    def __new__(  # noqa: PYI034 - meshes are interned and the class is never subclassed
        cls,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        _rank: int | None = None,
    ) -> DeviceMesh:
        """Return the interned mesh of these values."""
        shape, ranks = shape_and_ranks(mesh)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        _check(device_type, shape, ranks, names)
        if _rank is None:
            platform = current_platform()
            platform.join_launched_world(device_type)
            transport = platform.transport()
            _check_world(ranks, transport.world_size)
            _rank = transport.rank
        return cls._interned(device_type, shape, ranks, names, _rank)

    @classmethod
    def _interned(
        cls,
        device_type: str,
        shape: tuple[int, ...],
        ranks: tuple[int, ...],
        names: tuple[str, ...] | None,
        rank: int,
    ) -> DeviceMesh:
        key = (device_type, shape, ranks, names, rank)
        mesh = _INTERNED.get(key)
        if mesh is None:
            with _LOCK:
                mesh = _INTERNED.get(key)
                if mesh is None:
                    mesh = _INTERNED[key] = cls._build(key)
            _ROOM.make()
        return mesh

    @classmethod
    def _build(cls, key: tuple[Any, ...]) -> DeviceMesh:
        self = object.__new__(cls)
        self.device_type, self.shape, self.ranks, self.mesh_dim_names, self.rank = key
        self.names = self.mesh_dim_names or tuple(str(axis) for axis in range(len(self.shape)))
        index = self.ranks.index(self.rank) if self.rank in self.ranks else None
        self.coordinate = None if index is None else unravel(index, self.shape)
        self._ranks_along_cache, self._positions = {}, None
        return self

    @classmethod
    def abstract(
        cls, device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...] | None
    ) -> DeviceMesh:
        """Return a mesh for planning, without a running world.

        Args:
            device_type: ``cpu``, ``cuda`` or ``npu``.
            shape: sizes of the axes.
            ranks: global ranks, row-major.
            names: names of the axes, or None.

        Returns:
            the mesh as seen by the current rank, or by rank 0 outside of simulated ranks.

        Raises:
            MeshError: as for the class.
        """
        _check(device_type, shape, ranks, names)
        transport = active_transport()
        return cls._interned(device_type, shape, ranks, names, 0 if transport is None else transport.rank)

    def for_rank(self, rank: int) -> DeviceMesh:
        """Return this mesh as seen by global rank ``rank``; for planning, without a running world."""
        return self._interned(self.device_type, self.shape, self.ranks, self.mesh_dim_names, rank)

    # -- properties ----------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def mesh(self) -> RankGrid:
        """The ranks as nested lists."""
        return RankGrid(to_nested_lists(list(self.ranks), self.shape))

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes of the axes, ``shape``, under the name that :class:`Layout` has for it."""
        return self.shape

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The global ranks, row-major, ``ranks``, under the name that :class:`Layout` has for it."""
        return self.ranks

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks in the mesh, or along one axis."""
        return len(self.ranks) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def axis(self, name: int | str) -> int:
        """Return the index of the axis called ``name``; negative indices count from the right.

        Raises:
            MeshLookupError: (a MeshError, KeyError and IndexError) no such axis.
        """
        if isinstance(name, str) and name in self.names:
            return self.names.index(name)
        if isinstance(name, int) and not isinstance(name, bool) and -self.ndim <= name < self.ndim:
            return name % self.ndim
        msg = f"mesh has no axis {name!r}; its axes are {self.names} of sizes {self.shape}"
        raise MeshLookupError(msg)

    def get_coordinate(self) -> list[int] | None:
        """Position of the current rank, or None if it is not in the mesh."""
        return None if self.coordinate is None else list(self.coordinate)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Position of the current rank along one axis; a mesh of one axis needs no ``mesh_dim``.

        Raises:
            MeshError: the rank is not in the mesh, or the mesh has several axes and ``mesh_dim`` is not given.
        """
        return self.own_coordinate()[self._resolve_axis(mesh_dim, "get_local_rank")]

    def get_rank(self) -> int:
        """Return the global rank of this process."""
        return self.rank

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """Position of the global rank ``rank``.

        Raises:
            MeshLookupError: (a MeshError) the rank is not in the mesh.
        """
        if self._positions is None:
            self._positions = {each: position for position, each in enumerate(self.ranks)}
        position = self._positions.get(rank)
        if position is None:
            raise self._not_in_mesh_error(rank)
        return unravel(position, self.shape)

    def ranks_along(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Global ranks that differ from this one along ``axes`` only, row-major in the order of ``axes``."""
        ranks = self._ranks_along_cache.get(axes)
        if ranks is None:
            ranks = self._ranks_along_cache[axes] = self._ranks_along(axes, self.own_coordinate())
        return ranks

    def _ranks_along(self, axes: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, ...]:
        ranks = []
        for indices in itertools.product(*(range(self.shape[axis]) for axis in axes)):
            position = list(coordinate)
            for axis, index in zip(axes, indices, strict=True):
                position[axis] = index
            ranks.append(self.ranks[ravel(position, self.shape)])
        return tuple(ranks)

    def get_rank_list_along_axis(self, axis: int | str) -> list[int]:
        """Global ranks along one axis through the current rank."""
        return list(self.ranks_along((self.axis(axis),)))

    def to_hash(self) -> str:
        """Return a digest of device, shape, names and ranks, which is equal on every rank of the mesh."""
        facts = repr((self.device_type, self.shape, self.mesh_dim_names, self.ranks))
        return hashlib.sha256(facts.encode()).hexdigest()

    # -- groups --------------------------------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the group along one axis, for the framework's own functions; it is created on first use."""
        axis = self._resolve_axis(mesh_dim, "get_group")
        return current_platform().mesh_group(self.ranks_along((axis,)))

    def get_all_groups(self) -> list[Any]:
        """One group per axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    @classmethod
    def from_group(
        cls,
        group: Any,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return the mesh over the ranks of existing groups.

        Args:
            group: a group, or a list of groups, one per axis of ``mesh``.
            device_type: ``cpu``, ``cuda`` or ``npu``.
            mesh: nested global ranks; by default those of the one group.
            mesh_dim_names: one name per axis.

        Raises:
            MeshError: a list of groups without ``mesh``, or a grid that does not hold the groups' ranks.
        """
        transport = current_platform().transport()
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is None:
            if len(groups) != 1:
                msg = (
                    f"from_group: {len(groups)} groups were given; also pass mesh=, the grid of ranks whose axes they "
                    "are"
                )
                raise MeshError(msg)
            mesh = list(transport.ranks_of(groups[0]))
        built = cls(device_type, mesh, mesh_dim_names=mesh_dim_names)
        for axis, axis_group in enumerate(groups):
            if set(transport.ranks_of(axis_group)) != set(built.ranks_along((axis,))):
                msg = (
                    f"from_group: group {axis} has ranks {transport.ranks_of(axis_group)}, "
                    f"axis {built.names[axis]} of mesh has {built.ranks_along((axis,))}"
                )
                raise MeshError(msg)
        return built

    # -- slicing -------------------------------------------------------------------------------------------------

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the submesh through the current rank over the named axes, in the order of ``names``.

        A rank outside of the mesh gets the submesh through the first rank, of which it is outside as well.

        Raises:
            MeshError: (a ValueError) no names, or an axis is named twice.
            MeshLookupError: (a MeshError, KeyError and IndexError) no such axis.
        """
        untyped: object = names  # callers may not be type-checked
        if not isinstance(untyped, (str, tuple)) or not untyped:
            # Not an IndexError: Python would treat that as the end of iteration.
            msg = (
                f"mesh[{names!r}]: axes are chosen by name, as in mesh[{self.names[0]!r}]; the mesh has the axes "
                f"{self.names} of sizes {self.shape}"
            )
            raise MeshError(msg)
        axes = tuple(self.axis(name) for name in ((names,) if isinstance(names, str) else names))
        if len(set(axes)) != len(axes):
            msg = f"mesh[{names!r}]: an axis is named twice"
            raise MeshError(msg)
        if axes == tuple(range(self.ndim)):
            return self
        shape = tuple(self.shape[axis] for axis in axes)
        sub_names = None if self.mesh_dim_names is None else tuple(self.names[axis] for axis in axes)
        # A rank outside of the mesh is outside of every submesh: it gets that of the first rank.
        ranks = self._ranks_along(axes, (0,) * self.ndim) if self.coordinate is None else self.ranks_along(axes)
        return self._interned(self.device_type, shape, ranks, sub_names, self.rank)

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Return a mesh of one axis over the same ranks.

        Args:
            mesh_dim_name: name of the axis; by default the names of all axes joined by ``_``.

        Raises:
            MeshError: (a ValueError) ``mesh_dim_name`` cannot be the name of an axis.
        """
        name = "_".join(self.names) if mesh_dim_name is None else mesh_dim_name
        _check(self.device_type, (len(self.ranks),), self.ranks, (name,))
        return self._interned(self.device_type, (len(self.ranks),), self.ranks, (name,), self.rank)

    _flatten = flatten  # the name in PyTorch's DeviceMesh

    def joined(self, groups: Sequence[Sequence[str]]) -> DeviceMesh:
        """Return a mesh over the same ranks in which axes are joined.

        Args:
            groups: names of axes, each at most once. Each group becomes one axis, at the place of its first axis: its
                last named axis varies fastest, and ``_`` joins the names. Axes of no group stay.

        Raises:
            MeshError: (a ValueError) two axes would have the same name.
            MeshLookupError: (a MeshError, KeyError and IndexError) no such axis.
        """
        group_of = {self.axis(name): tuple(map(self.axis, group)) for group in groups for name in group}
        parts = list(dict.fromkeys(group_of.get(axis, (axis,)) for axis in range(self.ndim)))
        shape = tuple(math.prod(self.shape[axis] for axis in part) for part in parts)
        names = tuple("_".join(self.names[axis] for axis in part) for part in parts)
        order = tuple(axis for part in parts for axis in part)
        ranks = self.ranks if order == tuple(range(self.ndim)) else self._ranks_along(order, (0,) * self.ndim)
        _check(self.device_type, shape, ranks, names)
        return self._interned(self.device_type, shape, ranks, names, self.rank)

    def unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        *,
        backend_override: Mapping[str, Any] | None = None,
    ) -> DeviceMesh:
        """Return a mesh over the same ranks in which one axis is split into several, outermost first.

        Args:
            dim: index or name of the axis.
            mesh_sizes: sizes of the new axes.
            mesh_dim_names: their names.
            backend_override: only ``"fake"`` is accepted, for axes whose group is not used. It has no effect, because
                groups are created when ``get_group`` is first called.

        Raises:
            MeshError: (a ValueError) the product of the sizes is not the size of the axis, the names do not match the
                sizes, or ``backend_override`` chooses an engine.
        """
        axis, names = self.axis(dim), tuple(mesh_dim_names)
        sizes: tuple[Any, ...] = tuple(mesh_sizes)  # callers may not be type-checked
        positive = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
        if not positive or math.prod(sizes) != self.shape[axis]:
            msg = f"unflatten: sizes {sizes} do not multiply to {self.shape[axis]}, the size of axis {self.names[axis]}"
            raise MeshError(msg)
        if len(names) != len(sizes):
            msg = f"unflatten: mesh_dim_names has {len(names)} names {names} for {len(sizes)} axes of sizes {sizes}"
            raise MeshError(msg)
        others = {name: engine for name, engine in (backend_override or {}).items() if engine != "fake"}
        if others:
            msg = f"unflatten: backend_override {others} chooses an engine; all groups have that of the world"
            raise MeshError(msg)
        shape = (*self.shape[:axis], *sizes, *self.shape[axis + 1 :])
        all_names = (*self.names[:axis], *names, *self.names[axis + 1 :])
        _check(self.device_type, shape, self.ranks, all_names)
        return self._interned(self.device_type, shape, self.ranks, all_names, self.rank)

    _unflatten = unflatten  # as PyTorch's DeviceMesh calls it

    # -- context -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Make this the current mesh of the thread or task."""
        _CURRENT.set((*_CURRENT.get(), self))
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the mesh that was current before this one."""
        _CURRENT.set(_CURRENT.get()[:-1])

    # -- printing, pickling, copying -----------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value; unpickling gives the mesh of the rank that unpickles it."""
        return (rebuild_mesh, (self.device_type, self.mesh.tolist(), self.mesh_dim_names))

    def __copy__(self) -> DeviceMesh:
        """Return the mesh itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        """Return the mesh itself, which is immutable."""
        return self

    def __repr__(self) -> str:
        """``DeviceMesh(cpu, dp=2, tp=3, ranks=[0, 1, 2, 3, 4, 5])``; without names, ``DeviceMesh(cpu, 2x3, ...)``."""
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))
        if self.mesh_dim_names is None:
            axes = "x".join(map(str, self.shape))
        if len(self.ranks) > _MAX_PRINTED_RANKS:
            ranks = f"{self.ranks[0]}, {self.ranks[1]}, ..., {self.ranks[-1]}"
        else:
            ranks = ", ".join(map(str, self.ranks))
        return f"DeviceMesh({self.device_type}, {axes}, ranks=[{ranks}])"

    def own_coordinate(self) -> tuple[int, ...]:
        """Return the position of the current rank.

        Raises:
            MeshLookupError: (a MeshError) the current rank is not in the mesh.
        """
        if self.coordinate is None:
            msg = (
                f"{self._not_in_mesh_error(self.rank)}: it holds no shard of tensors on that mesh and takes no part in "
                "its collectives; leave it out with 'if mesh.get_coordinate() is not None:'"
            )
            raise MeshLookupError(msg)
        return self.coordinate

    def _not_in_mesh_error(self, rank: int) -> MeshLookupError:
        return MeshLookupError(f"rank {rank} is not in {self!r}")

    def _resolve_axis(self, mesh_dim: int | str | None, caller: str) -> int:
        if mesh_dim is not None:
            return self.axis(mesh_dim)
        if self.ndim != 1:
            msg = f"{caller}: the mesh has axes {self.names}; name one of them"
            raise MeshError(msg)
        return 0


class RankGrid(list[Any]):
    """Ranks as nested lists, with the methods of PyTorch's tensor of ranks that programs call."""

    def numel(self) -> int:
        """Number of ranks."""
        return sum(RankGrid(row).numel() if isinstance(row, list) else 1 for row in self)

    def tolist(self) -> list[Any]:
        """The ranks as plain nested lists."""
        return list(self)


class _Room:
    """Limit on live meshes; beyond it, the caches keyed by layout are emptied."""

    def __init__(self) -> None:
        self.most = 0

    def make(self) -> None:
        """Empty the caches if there are too many meshes; the new limit is twice the number that remain."""
        if len(_INTERNED) > max(self.most, _MAX_MESHES):
            empty_layout_caches()
            gc.collect()  # a transition and its adjoint refer to each other
            self.most = 2 * len(_INTERNED)


_ROOM = _Room()


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Sequence[int] | None = None,
) -> DeviceMesh:
    """Arrange the ranks of the world, or those of ``rank_list``, row-major in a grid.

    Under a launcher such as torchrun, a process that has not joined the world does so here, as with PyTorch's function.

    Args:
        device_type: ``cpu``, ``cuda`` or ``npu``.
        mesh_shape: sizes of the axes.
        mesh_dim_names: one name per axis; without names, axes are named ``"0"``, ``"1"``, ….
        rank_list: global ranks; by default all ranks of the world.

    Raises:
        MeshError: (a ValueError and RuntimeError) the grid does not have the number of ranks of the world or of
            ``rank_list``, or names or ranks repeat.
    """
    shape: tuple[Any, ...] = tuple(mesh_shape)  # callers may not be type-checked
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        msg = f"init_device_mesh: mesh_shape must be positive ints, got {shape}"
        raise MeshError(msg)
    if rank_list is None:
        platform = current_platform()
        if device_type in DEVICE_TYPES:
            platform.join_launched_world(device_type)
        world = platform.transport().world_size
        rank_list, source = range(world), f"the world has {world}"
    else:
        source = f"rank_list has {len(rank_list)}"
    if math.prod(shape) != len(rank_list):
        msg = f"init_device_mesh: mesh_shape {shape} needs {math.prod(shape)} ranks, {source}"
        raise MeshError(msg)
    return DeviceMesh(device_type, to_nested_lists(list(rank_list), shape), mesh_dim_names=mesh_dim_names)


def get_current_mesh() -> DeviceMesh | None:
    """The innermost mesh entered with ``with mesh:`` in this thread or task, or None."""
    stack = _CURRENT.get()
    return stack[-1] if stack else None


def common_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the axes of two slices of one mesh, in the order of that mesh.

    Raises:
        MeshError: (a ValueError) they have an axis in common, or not exactly one mesh has both as slices.
    """
    names = (*first.names, *second.names)
    with _LOCK:
        meshes = [mesh for mesh in _INTERNED.values() if mesh.rank == first.rank and set(names) <= set(mesh.names)]
    slices: list[DeviceMesh] = []
    for mesh in meshes if len(set(names)) == len(names) else ():
        if mesh.coordinate is None or mesh[first.names] is not first or mesh[second.names] is not second:
            continue
        part = mesh[tuple(name for name in mesh.names if name in names)]
        if part not in slices:
            slices.append(part)
    if len({frozenset(part.ranks) for part in slices}) != 1:
        msg = f"{first!r} and {second!r} are slices of {len(slices)} common meshes; they must be of one"
        raise MeshError(msg)
    return slices[0]


def rebuild_mesh(device_type: str, mesh: list[Any], names: tuple[str, ...] | None) -> DeviceMesh:
    """Return the pickled mesh, as seen by the rank that unpickles it."""
    return DeviceMesh(device_type, mesh, mesh_dim_names=names)


def _check(device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[Any, ...] | None) -> None:
    problem = None
    if device_type not in DEVICE_TYPES:
        problem = f"device_type {device_type!r} is not one of {', '.join(DEVICE_TYPES)}"
    elif not ranks or not shape:
        problem = "mesh has no ranks or no axis"
    elif len(set(ranks)) != len(ranks):
        problem = f"ranks repeat: {list(ranks)}"
    elif names is not None and len(names) != len(shape):
        problem = f"mesh_dim_names has {len(names)} names {names} for {len(shape)} axes of sizes {shape}"
    elif names is not None and len(set(names)) != len(names):
        problem = f"mesh_dim_names repeat: {names}"
    elif names is not None and not all(isinstance(name, str) and name and name != "None" for name in names):
        problem = f"mesh_dim_names must be non-empty strings other than 'None', got {names}"
    if problem is not None:
        msg = f"DeviceMesh: {problem}"
        raise MeshError(msg)


def _check_world(ranks: tuple[int, ...], world: int) -> None:
    outside = [rank for rank in ranks if not 0 <= rank < world]
    if outside:
        msg = f"DeviceMesh: ranks {outside} are outside the world of {world}"
        raise MeshError(msg)


def shape_and_ranks(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the row-major ranks of a nested sequence of ranks.

    Raises:
        MeshError: the rows have different lengths.
    """
    if hasattr(mesh, "tolist"):
        mesh = mesh.tolist()
    if isinstance(mesh, int):
        return (), (mesh,)
    rows = [shape_and_ranks(row) for row in mesh]
    if len({shape for shape, _ in rows}) > 1:
        msg = f"DeviceMesh: mesh must be a regular grid of ranks, got {mesh!r}"
        raise MeshError(msg)
    inner = rows[0][0] if rows else ()
    return (len(rows), *inner), tuple(rank for _, ranks in rows for rank in ranks)


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the position of the row-major index ``index`` in a grid of ``shape``."""
    position = []
    for size in reversed(shape):
        index, remainder = divmod(index, size)
        position.append(remainder)
    return tuple(reversed(position))


def ravel(position: Sequence[int], shape: tuple[int, ...]) -> int:
    """Return the row-major index of ``position`` in a grid of ``shape``."""
    index = 0
    for coordinate, size in zip(position, shape, strict=True):
        index = index * size + coordinate
    return index


def to_nested_lists(flat: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return row-major items as nested lists of ``shape``."""
    if len(shape) <= 1:
        return flat
    inner = math.prod(shape[1:])
    return [to_nested_lists(flat[start : start + inner], shape[1:]) for start in range(0, len(flat), inner)]

"""Device meshes: ranks arranged in named axes.

A mesh is an immutable value, interned: two meshes of equal device, shape, names and ranks, seen by the same rank,
are one object. The rank that looks at it is part of the value, so a coordinate is a plain attribute and everything
built on a mesh (layouts, plans) may be cached by identity, also where many ranks live in one process.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import MeshError, MeshLookupError
from hyper_parallel.platform.select import current_platform
from hyper_parallel.transport.base import active_transport

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["DeviceMesh", "get_current_mesh", "init_device_mesh"]

DEVICE_TYPES = ("cpu", "cuda", "npu")

_MOST_SHOWN = 64  # ranks, by what prints a mesh
_INTERNED: dict[tuple[Any, ...], DeviceMesh] = {}
_LOCK = threading.Lock()
_CURRENT: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("hyper_parallel_mesh", default=())


class DeviceMesh:
    """Ranks in a grid of named axes.

    Args:
        device_type: ``cpu``, ``cuda`` or ``npu``.
        mesh: nested sequence (or array) of global ranks; every rank at most once.
        mesh_dim_names: one name per axis; without them axes are called by their number.

    Attributes:
        device_type: where local tensors live.
        shape: sizes of the axes.
        ranks: global ranks, row-major.
        mesh_dim_names: names of the axes, or None.
        rank: the global rank that looks at the mesh.
        coordinate: its position, or None when it is not a member.

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
    _along: dict[tuple[int, ...], tuple[int, ...]]

    def __new__(  # noqa: PYI034 - meshes are interned and the class is final in all but name
        cls,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        _rank: int | None = None,
    ) -> DeviceMesh:
        """Return the one mesh of these values."""
        shape, ranks = shape_and_ranks(mesh)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        _check(device_type, shape, ranks, names)
        if _rank is None:
            transport = current_platform().transport()
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
        found = _INTERNED.get(key)
        if found is None:
            with _LOCK:
                found = _INTERNED.get(key)
                if found is None:
                    found = _INTERNED[key] = cls._build(key)
        return found

    @classmethod
    def _build(cls, key: tuple[Any, ...]) -> DeviceMesh:
        self = object.__new__(cls)
        self.device_type, self.shape, self.ranks, self.mesh_dim_names, self.rank = key
        self.names = self.mesh_dim_names or tuple(str(axis) for axis in range(len(self.shape)))
        index = self.ranks.index(self.rank) if self.rank in self.ranks else None
        self.coordinate = None if index is None else unravel(index, self.shape)
        self._along = {}
        return self

    @classmethod
    def grid(
        cls, device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...] | None
    ) -> DeviceMesh:
        """A mesh to plan with: no world needs to exist; the current rank is rank 0 where none runs."""
        _check(device_type, shape, ranks, names)
        transport = active_transport()
        return cls._interned(device_type, shape, ranks, names, 0 if transport is None else transport.rank)

    def seen_by(self, rank: int) -> DeviceMesh:
        """The same mesh as the global rank ``rank`` looks at it: for plans, which need no world."""
        return self._interned(self.device_type, self.shape, self.ranks, self.mesh_dim_names, rank)

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def mesh(self) -> list[Any]:
        """The ranks as nested lists."""
        return nest(list(self.ranks), self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks, or of those along one axis."""
        return len(self.ranks) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def axis(self, name: int | str) -> int:
        """Number of the axis called ``name``; negative numbers count from the right.

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
        """Position of the current rank, or None when it is not in the mesh."""
        return None if self.coordinate is None else list(self.coordinate)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Position of the current rank along one axis; the axis may be left out of a one-axis mesh.

        Raises:
            MeshError: the rank is not in the mesh, or the mesh has several axes and none is named.
        """
        return self._member()[self._only_axis(mesh_dim, "get_local_rank")]

    def get_rank(self) -> int:
        """Global rank that looks at the mesh."""
        return self.rank

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """Position of the global rank ``rank``.

        Raises:
            MeshLookupError: (a MeshError) the rank is not in the mesh.
        """
        if rank not in self.ranks:
            raise self._stranger(rank)
        return unravel(self.ranks.index(rank), self.shape)

    def ranks_along(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Global ranks that differ from this one along ``axes`` only, row-major in the order of ``axes``."""
        found = self._along.get(axes)
        if found is None:
            found = self._along[axes] = self._ranks_along(axes, self._member())
        return found

    def _ranks_along(self, axes: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
        found = []
        for steps in itertools.product(*(range(self.shape[axis]) for axis in axes)):
            position = list(at)
            for axis, step in zip(axes, steps, strict=True):
                position[axis] = step
            found.append(self.ranks[ravel(position, self.shape)])
        return tuple(found)

    def get_rank_list_along_axis(self, axis: int | str) -> list[int]:
        """Global ranks along one axis through the current rank."""
        return list(self.ranks_along((self.axis(axis),)))

    def to_hash(self) -> str:
        """Digest of device, shape, names and ranks: equal on every rank that holds the same mesh."""
        facts = repr((self.device_type, self.shape, self.mesh_dim_names, self.ranks))
        return hashlib.sha256(facts.encode()).hexdigest()

    # -- groups --------------------------------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The transport's group along one axis, created on first use."""
        axis = self._only_axis(mesh_dim, "get_group")
        return current_platform().transport().group(self.ranks_along((axis,)))

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
        """The mesh over the ranks of ``group`` (or over ``mesh``, a grid whose axes are the groups of a list).

        Raises:
            MeshError: a list of groups without ``mesh``, or a grid that does not hold the groups' ranks.
        """
        transport = current_platform().transport()
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is None:
            if len(groups) != 1:
                msg = f"from_group: {len(groups)} groups need mesh=, the grid of ranks whose axes they are"
                raise MeshError(msg)
            mesh = list(transport.ranks_of(groups[0]))
        built = cls(device_type, mesh, mesh_dim_names=mesh_dim_names)
        for axis, one in enumerate(groups):
            if set(transport.ranks_of(one)) != set(built.ranks_along((axis,))):
                msg = (
                    f"from_group: group {axis} has ranks {transport.ranks_of(one)}, "
                    f"axis {built.names[axis]} of mesh has {built.ranks_along((axis,))}"
                )
                raise MeshError(msg)
        return built

    # -- slicing -------------------------------------------------------------------------------------------------

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Submesh through the current rank over the named axes, in the order given.

        Raises:
            MeshError: (a ValueError) no names, or an axis is named twice.
            MeshLookupError: (a MeshError, KeyError and IndexError) no such axis.
        """
        given: object = names  # callers may be untyped
        if not isinstance(given, (str, tuple)) or not given:
            # No IndexError: Python would take it for the end of a sequence.
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
        return self._interned(self.device_type, shape, self.ranks_along(axes), sub_names, self.rank)

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """One-axis mesh over the same ranks, called ``mesh_dim_name`` or the names joined by ``_``.

        Raises:
            MeshError: (a ValueError) no name for an axis.
        """
        name = "_".join(self.names) if mesh_dim_name is None else mesh_dim_name
        _check(self.device_type, (len(self.ranks),), self.ranks, (name,))
        return self._interned(self.device_type, (len(self.ranks),), self.ranks, (name,), self.rank)

    # -- context -------------------------------------------------------------------------------------------------

    def __enter__(self) -> DeviceMesh:  # noqa: PYI034 - as above
        """Make this the current mesh of the thread or task."""
        _CURRENT.set((*_CURRENT.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the mesh that was current before."""
        _CURRENT.set(_CURRENT.get()[:-1])

    # -- value ---------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value; the rank that unpickles looks at the mesh itself."""
        return (_rebuild, (self.device_type, self.mesh, self.mesh_dim_names))

    def __copy__(self) -> DeviceMesh:
        """Immutable: the mesh itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        """Immutable: the mesh itself."""
        return self

    def __repr__(self) -> str:
        """``DeviceMesh(cpu, dp=2, tp=3, ranks=[0..5])``."""
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))
        ranks = ", ".join(map(str, self.ranks))
        if len(self.ranks) > _MOST_SHOWN:
            ranks = f"{self.ranks[0]}, {self.ranks[1]}, ..., {self.ranks[-1]}"
        return f"DeviceMesh({self.device_type}, {axes}, ranks=[{ranks}])"

    def _member(self) -> tuple[int, ...]:
        if self.coordinate is None:
            msg = (
                f"{self._stranger(self.rank)}: it holds no piece of a tensor there, and takes no part in what its "
                "ranks do; leave it out with 'if mesh.get_coordinate() is not None:'"
            )
            raise MeshLookupError(msg)
        return self.coordinate

    def _stranger(self, rank: int) -> MeshLookupError:
        return MeshLookupError(f"rank {rank} is not in {self!r}")

    def _only_axis(self, mesh_dim: int | str | None, caller: str) -> int:
        if mesh_dim is not None:
            return self.axis(mesh_dim)
        if self.ndim != 1:
            msg = f"{caller}: the mesh has axes {self.names}; say which one"
            raise MeshError(msg)
        return 0


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Sequence[int] | None = None,
) -> DeviceMesh:
    """Arrange the world (or ``rank_list``) in a grid of ``mesh_shape``, row-major.

    Raises:
        MeshError: (a ValueError and RuntimeError) the grid does not fit the world or the list, or names or ranks
            repeat.
    """
    shape: tuple[Any, ...] = tuple(mesh_shape)  # callers may be untyped
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        msg = f"init_device_mesh: mesh_shape must be positive ints, got {shape}"
        raise MeshError(msg)
    if rank_list is None:
        world = current_platform().transport().world_size
        rank_list, source = range(world), f"the world has {world}"
    else:
        source = f"rank_list has {len(rank_list)}"
    if math.prod(shape) != len(rank_list):
        msg = f"init_device_mesh: mesh_shape {shape} needs {math.prod(shape)} ranks, {source}"
        raise MeshError(msg)
    return DeviceMesh(device_type, nest(list(rank_list), shape), mesh_dim_names=mesh_dim_names)


def get_current_mesh() -> DeviceMesh | None:
    """The innermost mesh entered with ``with mesh:`` in this thread or task, or None."""
    stack = _CURRENT.get()
    return stack[-1] if stack else None


def _rebuild(device_type: str, mesh: list[Any], names: tuple[str, ...] | None) -> DeviceMesh:
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
    """Shape and row-major ranks of a nested sequence; ragged rows are an error.

    Raises:
        MeshError: the rows are of different lengths.
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
    """Position of row-major index ``index``."""
    position = []
    for size in reversed(shape):
        index, step = divmod(index, size)
        position.append(step)
    return tuple(reversed(position))


def ravel(position: Sequence[int], shape: tuple[int, ...]) -> int:
    """Row-major index of ``position``."""
    index = 0
    for step, size in zip(position, shape, strict=True):
        index = index * size + step
    return index


def nest(flat: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Row-major items as nested lists."""
    if len(shape) <= 1:
        return flat
    inner = math.prod(shape[1:])
    return [nest(flat[start : start + inner], shape[1:]) for start in range(0, len(flat), inner)]

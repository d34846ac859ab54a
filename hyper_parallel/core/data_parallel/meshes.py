"""The mesh axes that shard the parameters of ``fully_shard``, those that replicate them, and the resulting layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import resolve_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import common_mesh
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import ArgumentTypeError, MeshError, PlanError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = [
    "DataAxes",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "ShardPlacementResult",
    "data_axes",
    "placed",
    "sharded_layout",
]

_MOST_AXES = 2


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data axes of a mesh that has other axes as well, for ``fully_shard``.

    Attributes:
        shard: axis that shards each parameter, or several, which are flattened into one, in this order.
        replicate: axis along which the shards are replicated, or several; without ``shard``, parameters are not
            sharded.

    Raises:
        PlanError: (a ValueError) neither is given.
        ArgumentTypeError: (a TypeError) one of them is neither a name nor a sequence of names.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.shard_names and not self.replicate_names:
            msg = "DataParallelMeshDims: shard and replicate name no axis; name the data axes of the mesh"
            raise PlanError(msg)

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes of ``shard``."""
        return _names("shard", self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes of ``replicate``."""
        return _names("replicate", self.replicate)


def _names(field: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else value
    if names is None:
        return ()
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        msg = f"DataParallelMeshDims: {field}={value!r} must be the name of an axis, or a tuple of names"
        raise ArgumentTypeError(msg)
    return names


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A mesh with the data axes of some of a module's parameters, over one of which ``fully_shard`` shards them.

    Attributes:
        mesh: the mesh.
        shard_mesh_dim: index of the axis that shards each parameter.
        replicate_mesh_dim: index of the axis along which the shards are replicated, if there is one.
        dp_mesh_dims: names of those axes, instead of the indices.

    Raises:
        PlanError: (a ValueError) neither ``shard_mesh_dim`` nor ``dp_mesh_dims`` is given, or both are.
        MeshError: (a ValueError) the mesh has no such axes, or one is given twice.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        self.axes()

    def axes(self) -> DataAxes:
        """Return the data axes."""
        mesh = resolve_mesh(self.mesh)
        dims = [dim for dim in (self.replicate_mesh_dim, self.shard_mesh_dim) if dim is not None]
        if bool(dims) == (self.dp_mesh_dims is not None) or (dims and self.shard_mesh_dim is None):
            msg = f"{type(self).__name__}: pass shard_mesh_dim, the index of an axis of {mesh!r}, or dp_mesh_dims"
            raise PlanError(msg)
        if self.dp_mesh_dims is not None:
            return data_axes(mesh, self.dp_mesh_dims)
        return DataAxes(mesh[tuple(mesh.names[mesh.axis(dim)] for dim in dims)])


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo):
    """A mesh with a replicating axis and a sharding axis; see :class:`FSDPMeshInfo`.

    Raises:
        PlanError: (a ValueError) no replicating axis is given, or for a reason of :class:`FSDPMeshInfo`.
    """

    def __post_init__(self) -> None:
        """Check the values."""
        if self.axes().mesh.ndim < _MOST_AXES:
            msg = "HSDPMeshInfo: no axis of replicas is given; pass replicate_mesh_dim too, or FSDPMeshInfo"
            raise PlanError(msg)


@dataclass(frozen=True)
class ShardPlacementResult:
    """Result of ``shard_placement_fn`` for a parameter whose data axes differ from those of the rest of its module.

    Attributes:
        placement: ``Shard(dim)``; None is dim 0.
        mesh_info: the parameter's data axes. Its gradients are averaged over these axes only.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


@dataclass(frozen=True)
class DataAxes:
    """The data axes of a group of parameters.

    Attributes:
        mesh: the replicating axis, if there is one, and the sharding axis; without a sharding axis, only replicating
            axes.
        shards_parameters: whether the last axis of ``mesh`` shards each parameter.
        given: the mesh whose axes ``DataParallelMeshDims`` names; None if ``mesh`` itself was passed.
        joined: ``given`` with the data axes flattened.
    """

    mesh: DeviceMesh
    shards_parameters: bool = True
    given: DeviceMesh | None = None
    joined: DeviceMesh | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks over which each parameter is sharded."""
        return self.mesh.ranks_along((self.mesh.ndim - 1,)) if self.shards_parameters else (self.mesh.rank,)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Global ranks that hold the same shards as this one, itself included."""
        replicating = tuple(range(self.mesh.ndim - 1))
        return self.mesh.ranks_along(replicating) if self.shards_parameters else tuple(self.mesh.ranks)

    def data_names(self, mesh: DeviceMesh) -> set[str]:
        """Return those axes of ``mesh``, a slice of ``given``, that are data axes."""
        return set() if self.joined is None else set(mesh.names) - self._other_names()

    def _other_names(self) -> set[str]:
        return set() if self.joined is None else set(self.joined.names) - set(self.mesh.names)

    def around(self, own: DeviceMesh) -> DeviceMesh:
        """Return the mesh of the data axes and of the other axes of ``own``, a parameter's mesh.

        Raises:
            MeshError: ``own`` is not a slice of the same mesh.
        """
        if self.given is None or self.joined is None:
            return common_mesh(self.mesh, own)
        if own is not self.given[own.names]:
            msg = f"{own!r} is not a slice of {self.given!r}"
            raise MeshError(msg)
        names = {*self.mesh.names, *(self._other_names() & set(own.names))}
        return self.joined[tuple(name for name in self.joined.names if name in names)]


def data_axes(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataAxes:
    """Return the data axes of ``mesh``.

    Args:
        mesh: if ``dims`` is None, a mesh of the sharding axis, or of the replicating axis and the sharding axis.
        dims: names of those axes, if ``mesh`` has other axes too.

    Raises:
        MeshError: (a ValueError) ``mesh`` has too many axes or no names, or ``dims`` names an axis that does not exist,
            or one twice.
        ArgumentTypeError: (a TypeError) ``dims`` is not a ``DataParallelMeshDims``.
    """
    if dims is None:
        if mesh.ndim > _MOST_AXES:
            msg = (
                f"fully_shard: {mesh!r} has {mesh.ndim} axes; pass the data axis, as in mesh[{mesh.names[0]!r}], or an "
                f"axis of replicas and the data axis, as in mesh[{mesh.names[0]!r}, {mesh.names[1]!r}]"
            )
            raise MeshError(msg)
        return DataAxes(mesh)
    untyped: Any = dims  # callers may not be type-checked
    if not isinstance(untyped, DataParallelMeshDims):
        msg = f"fully_shard: dp_mesh_dims={dims!r} must be DataParallelMeshDims(shard=..., replicate=...)"
        raise ArgumentTypeError(msg)
    axes = [part for part in (dims.replicate_names, dims.shard_names) if part]
    _check_names(mesh, [name for part in axes for name in part])
    joined = mesh.joined(axes)
    names = tuple("_".join(part) for part in axes)
    return DataAxes(joined[names], bool(dims.shard_names), mesh, joined)


def _check_names(mesh: DeviceMesh, names: list[str]) -> None:
    problem = None
    unknown = [name for name in names if name not in mesh.names]
    if mesh.mesh_dim_names is None:
        problem = f"{mesh!r} has axes without names; pass mesh_dim_names= where it is made"
    elif unknown:
        problem = f"dp_mesh_dims names the axis {unknown[0]!r}; the mesh has the axes {mesh.names}"
    elif len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problem = f"dp_mesh_dims names the axis {twice!r} twice; name it in shard or in replicate, once"
    if problem is not None:
        msg = f"fully_shard: {problem}"
        raise MeshError(msg)


def placed(place: Callable[[Any], Any] | None, axes: DataAxes, parameter: Any) -> tuple[DataAxes, int]:
    """Return the data axes of ``parameter``, and the dim that is split.

    Args:
        place: ``shard_placement_fn`` of :func:`fully_shard`.
        axes: the data axes of parameters for which ``place`` returns no others.
        parameter: parameter of the module.

    Raises:
        PlanError: (a ValueError) ``place`` returns anything but a shard of a dim of the parameter, or there is no axis
            to shard over.
    """
    returned = placement = None if place is None else place(parameter)
    if isinstance(returned, ShardPlacementResult) and isinstance(returned.mesh_info, FSDPMeshInfo):
        axes, placement = returned.mesh_info.axes(), returned.placement
    if placement is None:
        return axes, 0
    problem, ndim = None, len(parameter.shape)
    if not isinstance(placement, Shard) or not -ndim <= placement.dim < ndim:
        problem = (
            "it must be Shard(dim) of one of its dims, None, or ShardPlacementResult(placement, FSDPMeshInfo(...))"
        )
    elif not axes.shards_parameters:
        problem = "dp_mesh_dims has no axis to shard over, so shard_placement_fn must return None"
    if problem is not None:
        shape = list(parameter.shape)
        msg = f"fully_shard: shard_placement_fn returned {returned!r} for a parameter of shape {shape}; {problem}"
        raise PlanError(msg)
    return axes, placement.dim % ndim


def sharded_layout(path: str, parameter: Any, axes: DataAxes, dim: int = 0) -> Layout:
    """Return the layout of the shards of ``parameter``, a DTensor, over the data axis as well.

    If tensor parallelism splits the dim, it does so first. The data axis then splits each of these shards, so the ranks
    of one data group together hold one tensor-parallel shard.

    Args:
        path: name of the parameter.
        parameter: a DTensor on a mesh of other axes; replicated along data axes that its mesh has.
        axes: the data axes.
        dim: dim that the sharding axis splits, if there is one.

    Raises:
        PlanError: (a ValueError) the parameter is partial or split along a data axis, or its mesh and that of ``axes``
            are not slices of one mesh.
    """
    layout = parameter.layout
    notation = layout.notation(parameter.dtype)
    if layout.partials:
        msg = f"fully_shard: parameter {path} is a DTensor {notation}; reduce it first, with reduce_partial()"
        raise PlanError(msg)
    try:
        whole = axes.around(layout.mesh)
    except MeshError as error:
        msg = (
            f"fully_shard: parameter {path} is a DTensor {notation} on {layout.mesh!r}, which is not a slice of one "
            f"mesh with {axes.given or axes.mesh!r}; build one mesh of all axes, and pass slices of it to tensor "
            "parallelism and to fully_shard"
        )
        raise PlanError(msg) from error
    data = axes.data_names(layout.mesh)
    dim_axes = []
    for number, split in enumerate(layout.dim_axes):
        names = [layout.mesh.names[axis] for axis in split]
        taken = [name for name in names if name in data]
        if taken:
            msg = (
                f"fully_shard: parameter {path} is a DTensor {notation}, whose dim {number} is sharded over the data "
                f"axis {taken[0]!r} already; replicate it along the data axes, and fully_shard shards it over them"
            )
            raise PlanError(msg)
        dim_axes.append(tuple(whole.axis(name) for name in names))
    if axes.shards_parameters:
        dim_axes[dim] = (*dim_axes[dim], whole.axis(axes.mesh.names[-1]))
    return Layout.of(whole, dim_axes, (), layout.shape)

"""The public spellings of placements: read into a layout's parts, and written from them."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.errors import LayoutError, PlacementError

__all__ = [
    "DimAxes",
    "Partials",
    "alias_of",
    "are_placements",
    "check_count",
    "from_aliases",
    "from_placements",
    "partials_of",
    "public_placements",
]

DimAxes = tuple[tuple[int, ...], ...]
Partials = tuple[tuple[int, str], ...]


def are_placements(placements: Any) -> bool:
    """True for a non-empty sequence of placements."""
    return bool(placements) and all(isinstance(place, Placement) for place in placements)


def from_placements(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> tuple[DimAxes, Partials]:
    """Read one placement per axis."""
    check_count(mesh, placements)
    dims: list[list[int]] = [[] for _ in range(ndim)]
    # Right to left: a split factor counts the axes further right that split the dim first.
    for axis in reversed(range(mesh.ndim)):
        place = placements[axis]
        if isinstance(place, Shard):
            dim = _normal_dim(place, ndim)
            dims[dim].insert(_position(mesh, dims[dim], place), axis)
    return tuple(map(tuple, dims)), partials_of(placements)


def check_count(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """There is one placement per axis.

    Raises:
        PlacementError: there is not.
    """
    if len(placements) != mesh.ndim:
        msg = (
            f"placements: {len(placements)} given ({', '.join(map(repr, placements))}) "
            f"for the {mesh.ndim} axes {mesh.names} of the mesh; give one per axis"
        )
        raise PlacementError(msg)


def partials_of(placements: tuple[Placement, ...]) -> Partials:
    """The axes that hold summands, and their reductions."""
    return tuple((axis, place.reduce_op) for axis, place in enumerate(placements) if isinstance(place, Partial))


def _normal_dim(place: Shard, ndim: int) -> int:
    if not -ndim <= place.dim < ndim:
        msg = f"placements: {place!r} names dim {place.dim}, the tensor has {ndim} dims"
        raise PlacementError(msg)
    return place.dim % ndim


def _position(mesh: DeviceMesh, inner: list[int], place: Shard) -> int:
    factor = place.split_factor if isinstance(place, StridedShard) else 1
    product = 1
    for position in range(len(inner) + 1):
        if product == factor:
            return position
        if position < len(inner):
            product *= mesh.shape[inner[position]]
    sizes = {mesh.names[axis]: mesh.shape[axis] for axis in inner}
    msg = f"placements: {place!r} needs axes to its right that split dim {place.dim} first by {factor}; there: {sizes}"
    raise LayoutError(msg)


def from_aliases(mesh: DeviceMesh, aliases: tuple[Any, ...], ndim: int) -> tuple[DimAxes, Partials]:
    """Read one alias per dim: an axis name, a tuple of them or ``"None"``."""
    if len(aliases) != ndim:
        msg = f"placements: {len(aliases)} aliases {aliases} given for a tensor of {ndim} dims; give one per dim"
        raise PlacementError(msg)
    dim_axes = tuple(tuple(mesh.axis(name) for name in _names(alias)) for alias in aliases)
    used = [axis for axes in dim_axes for axis in axes]
    if len(set(used)) != len(used):
        msg = f"placements: aliases {aliases} use an axis twice"
        raise LayoutError(msg)
    return dim_axes, ()


def _names(alias: Any) -> tuple[str, ...]:
    if alias is None or alias == "None":
        return ()
    names = (alias,) if isinstance(alias, str) else alias
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        msg = f"placements: {alias!r} is neither an axis name, a tuple of axis names nor 'None'"
        raise LayoutError(msg)
    return tuple(name for name in names if name != "None")


def alias_of(names: tuple[str, ...]) -> Any:
    """The alias of a dim that the axes ``names`` split."""
    return "None" if not names else names[0] if len(names) == 1 else names


def public_placements(mesh: DeviceMesh, dim_axes: DimAxes, partials: Partials) -> tuple[Placement, ...]:
    """One placement per axis, from the parts of a layout."""
    found: list[Placement] = [Replicate()] * mesh.ndim
    for axis, op in partials:
        found[axis] = Partial(op)
    for dim, axes in enumerate(dim_axes):
        for position, axis in enumerate(axes):
            factor = 1
            for outer in axes[:position]:
                factor *= mesh.shape[outer] if outer > axis else 1
            found[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return tuple(found)

"""Placements: how one mesh axis holds a tensor. Values, and nothing but values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import LayoutError, PlacementError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = [
    "PARTIAL_OPS",
    "DimAxes",
    "Partial",
    "Partials",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
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

PARTIAL_OPS = ("sum", "avg", "max", "min", "prod", "all", "any")


@dataclass(frozen=True)
class Placement:
    """Base of the placements; one describes what the ranks along one mesh axis hold."""

    def is_replicate(self) -> bool:
        """True for :class:`Replicate`."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:  # noqa: ARG002 - the subclass reads it
        """True for :class:`Shard` (and :class:`StridedShard`), of the dim ``dim`` if one is given."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:  # noqa: ARG002 - the subclass reads it
        """True for :class:`Partial`, of the reduction ``reduce_op`` if one is given."""
        return False


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank along the axis holds the whole tensor."""

    def is_replicate(self) -> bool:
        """Always true."""
        return True

    def __repr__(self) -> str:
        """``Replicate()``."""
        return "Replicate()"


@dataclass(frozen=True)
class Shard(Placement):
    """The ranks along the axis hold consecutive chunks of dim ``dim``, of ``ceil(size / n)`` each, the last ones less.

    Raises:
        TypeError: ``dim`` is not an int.
    """

    dim: int

    def __post_init__(self) -> None:
        """Reject what is not a dim."""
        dim: object = self.dim  # callers may be untyped
        if not isinstance(dim, int) or isinstance(dim, bool):
            msg = f"Shard(dim): dim must be an int, got {self.dim!r}"
            raise TypeError(msg)

    def is_shard(self, dim: int | None = None) -> bool:
        """True when no dim is asked for, or this one."""
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        """``Shard(0)``."""
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class StridedShard(Shard):
    """A shard of a dim that axes further right in the mesh split before it: the public spelling of a shard order.

    Args:
        dim: the tensor dim.
        split_factor: product of the sizes of those axes; 1 is an ordinary :class:`Shard`.
    """

    split_factor: int = 1

    def __post_init__(self) -> None:
        """Reject what is not a factor."""
        super().__post_init__()
        factor: object = self.split_factor
        if not isinstance(factor, int) or factor < 1:
            msg = f"StridedShard(dim, split_factor): split_factor must be a positive int, got {self.split_factor!r}"
            raise ValueError(msg)

    def __repr__(self) -> str:
        """``StridedShard(0, split_factor=2)``."""
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True)
class Partial(Placement):
    """Reducing what the ranks along the axis hold, with ``reduce_op``, gives the tensor.

    The gradient of what a rank holds is the tensor's own for ``sum``, and that divided by the number of ranks for
    ``avg``: ``grad`` of such a leaf is divided already, so its value moves by less than the same leaf's, replicated.

    Raises:
        ValueError: ``reduce_op`` is not one of ``PARTIAL_OPS``.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        """Reject an unknown reduction."""
        if self.reduce_op not in PARTIAL_OPS:
            msg = f"Partial(reduce_op): unknown reduction {self.reduce_op!r}; known: {', '.join(PARTIAL_OPS)}"
            raise ValueError(msg)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True when no reduction is asked for, or this one."""
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        """``Partial(sum)``."""
        return f"Partial({self.reduce_op})"


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

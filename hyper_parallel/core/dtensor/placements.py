"""Placements, which describe how the ranks along one mesh axis hold a tensor, and conversion of their public forms.

Users write placements in one of two forms: one placement per mesh axis, or one alias (axis name, tuple of axis names
or ``"None"``) per tensor dim. A layout stores neither form; it stores ``DimAxes`` and ``Partials``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import LayoutError, PlacementError
from hyper_parallel.platform.select import framework_of, platform_named

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
    "check_placement_count",
    "from_aliases",
    "from_placements",
    "own_placements",
    "partials_of",
    "public_placements",
]

DimAxes = tuple[tuple[int, ...], ...]
"""Per tensor dim the mesh axes that split it, outermost first."""
Partials = tuple[tuple[int, str], ...]
"""Pairs of a mesh axis and the reduction of the partial values along it, by axis."""

PARTIAL_OPS = ("sum", "avg", "max", "min", "prod", "all", "any")


@dataclass(frozen=True)
class Placement:
    """Base of the placements. A placement describes what the ranks along one mesh axis hold."""

    def is_replicate(self) -> bool:
        """True for :class:`Replicate`."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:
        """True for :class:`Shard` (and :class:`StridedShard`), of the dim ``dim`` if one is given."""
        del dim
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True for :class:`Partial`, of the reduction ``reduce_op`` if one is given."""
        del reduce_op
        return False


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank along the axis holds the complete tensor."""

    def is_replicate(self) -> bool:
        """Always true."""
        return True

    def __repr__(self) -> str:
        """``Replicate()``."""
        return "Replicate()"


@dataclass(frozen=True)
class Shard(Placement):
    """The ``n`` ranks along the axis hold consecutive shards of dim ``dim``.

    Each shard has ``ceil(size / n)`` elements along the dim; the last ones have fewer, or none, as in ``torch.chunk``.

    Args:
        dim: the tensor dim; negative dims count from the right.

    Raises:
        TypeError: ``dim`` is not an int.
    """

    dim: int

    def __post_init__(self) -> None:
        """Reject a dim that is not an int."""
        dim: object = self.dim  # callers may not be type-checked
        if not isinstance(dim, int) or isinstance(dim, bool):
            msg = f"Shard(dim): dim must be an int, got {self.dim!r}"
            raise TypeError(msg)

    def is_shard(self, dim: int | None = None) -> bool:
        """True if ``dim`` is None or the dim of this shard."""
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        """``Shard(0)``."""
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class StridedShard(Shard):
    """A shard of a dim that mesh axes further right have already split; it expresses the order of splits.

    Args:
        dim: the tensor dim.
        split_factor: product of the sizes of those axes; 1 is an ordinary :class:`Shard`.

    Raises:
        TypeError: ``dim`` is not an int.
        ValueError: ``split_factor`` is not a positive int.
    """

    split_factor: int = 1

    def __post_init__(self) -> None:
        """Reject an invalid dim or split factor."""
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
    """Each rank along the axis holds a partial value; reducing them with ``reduce_op`` gives the tensor.

    The gradient of a rank's partial value is the tensor's gradient for ``sum``, and for ``avg`` that gradient divided
    by the number of ranks. So an optimizer step changes an averaged leaf by less than a replicated one.

    Args:
        reduce_op: ``sum``, ``avg``, ``max``, ``min``, ``prod``, ``all`` or ``any``.

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
        """True if ``reduce_op`` is None or the reduction of this placement."""
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        """``Partial(sum)``."""
        return f"Partial({self.reduce_op})"


def own_placements(placements: Any) -> Any:
    """Convert placements of PyTorch's DTensor, also inside lists, tuples and dicts, to this library's.

    Raises:
        UnsupportedOperatorError: only PyTorch has such a placement.
    """
    if isinstance(placements, (Placement, str)) or placements is None:
        return placements
    if type(placements) in (list, tuple):
        return type(placements)(map(own_placements, placements))
    if type(placements) is dict:
        return {name: own_placements(value) for name, value in placements.items()}
    framework = framework_of(placements)
    return platform_named(framework).own_placement(placements) if framework else placements


def are_placements(placements: Any) -> bool:
    """Return True if ``placements`` is a non-empty sequence of :class:`Placement`."""
    return bool(placements) and all(isinstance(placement, Placement) for placement in placements)


def from_placements(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> tuple[DimAxes, Partials]:
    """Convert one placement per mesh axis to the form that a layout stores, for a tensor of ``ndim`` dims.

    Raises:
        PlacementError: there is not one placement per axis, or a placement names a dim that the tensor does not have.
        LayoutError: a split factor is not a product of sizes of axes to its right that split the dim first.
    """
    check_placement_count(mesh, placements)
    dims: list[list[int]] = [[] for _ in range(ndim)]
    # From right to left, because a split factor refers to the axes to its right that split the dim before it.
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if isinstance(placement, Shard):
            dim = _normalized_dim(placement, ndim)
            dims[dim].insert(_position(mesh, dims[dim], placement), axis)
    return tuple(map(tuple, dims)), partials_of(placements)


def check_placement_count(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """Check that there is one placement per mesh axis.

    Raises:
        PlacementError: the numbers differ.
    """
    if len(placements) != mesh.ndim:
        msg = (
            f"placements: {len(placements)} given ({', '.join(map(repr, placements))}) "
            f"for the {mesh.ndim} axes {mesh.names} of the mesh; give one per axis"
        )
        raise PlacementError(msg)


def partials_of(placements: tuple[Placement, ...]) -> Partials:
    """Return the axes that hold partial values, each with its reduction."""
    return tuple(
        (axis, placement.reduce_op) for axis, placement in enumerate(placements) if isinstance(placement, Partial)
    )


def _normalized_dim(placement: Shard, ndim: int) -> int:
    if not -ndim <= placement.dim < ndim:
        msg = f"placements: {placement!r} names dim {placement.dim}, the tensor has {ndim} dims"
        raise PlacementError(msg)
    return placement.dim % ndim


def _position(mesh: DeviceMesh, inner: list[int], placement: Shard) -> int:
    """Return the position of ``placement`` among the axes ``inner``, which split the same dim, by its split factor."""
    factor = placement.split_factor if isinstance(placement, StridedShard) else 1
    product = 1
    for position in range(len(inner) + 1):
        if product == factor:
            return position
        if position < len(inner):
            product *= mesh.shape[inner[position]]
    sizes = {mesh.names[axis]: mesh.shape[axis] for axis in inner}
    msg = (
        f"placements: {placement!r} needs axes to its right that split dim {placement.dim} first by {factor}; "
        f"found: {sizes}"
    )
    raise LayoutError(msg)


def from_aliases(mesh: DeviceMesh, aliases: tuple[Any, ...], ndim: int) -> tuple[DimAxes, Partials]:
    """Convert one alias per dim (an axis name, a tuple of axis names, or ``"None"``) to the form that a layout stores.

    Raises:
        PlacementError: there is not one alias per dim.
        LayoutError: an alias that is none of these, or an axis that is used twice.
        MeshLookupError: an axis that the mesh does not have.
    """
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
    """Return the alias of a dim that the axes ``names`` split."""
    return "None" if not names else names[0] if len(names) == 1 else names


def public_placements(mesh: DeviceMesh, dim_axes: DimAxes, partials: Partials) -> tuple[Placement, ...]:
    """Return one placement per mesh axis, from the form that a layout stores."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for axis, op in partials:
        placements[axis] = Partial(op)
    for dim, axes in enumerate(dim_axes):
        for position, axis in enumerate(axes):
            factor = 1
            for outer in axes[:position]:
                factor *= mesh.shape[outer] if outer > axis else 1
            placements[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return tuple(placements)

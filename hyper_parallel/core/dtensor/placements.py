"""Placements: how one mesh axis holds a tensor. Values, and nothing but values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PARTIAL_OPS", "Partial", "Placement", "Replicate", "Shard", "StridedShard"]

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

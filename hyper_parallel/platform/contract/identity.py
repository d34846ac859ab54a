"""Who am I: ranks and groups. ``group=None`` is the whole world everywhere."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import MeshError
from hyper_parallel.transport.base import Channel

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks, Transport

__all__ = ["IdentityFacet", "distinct_ranks", "is_integer"]


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer, of Python or NumPy; a truth is none, and 1.0 neither."""
    if isinstance(value, bool):
        return False
    try:
        index(value)
    except TypeError:
        return False
    return True


def distinct_ranks(given: Any, world_size: int) -> Ranks | None:
    """``given`` in its order, as plain integers; None where it names no rank, one twice, or one that is not there."""
    listed = tuple(given) if isinstance(given, Iterable) else ()
    if not all(map(is_integer, listed)):
        return None
    ranks = tuple(map(index, listed))
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
        return None
    return ranks


class IdentityFacet(abc.ABC):
    """Facet *identity*: the same on every framework, because the transport knows the answers."""

    @abc.abstractmethod
    def transport(self) -> Transport:
        """Who carries the bytes here."""

    def ranks_of(self, group: Any = None) -> Ranks:
        """Global ranks of a group handle, a rank tuple, or the world.

        Raises:
            MeshError: (a ValueError) no group of this world, or ranks that repeat, lie outside it or are no integers.
        """
        if not isinstance(group, (tuple, list)):
            return self.transport().ranks_of(group)
        ranks = distinct_ranks(group, self.get_world_size())
        if ranks is None:
            msg = f"group {group} must name different ranks of the world of {self.get_world_size()}"
            raise MeshError(msg)
        return ranks

    def _channel(self, group: Any, kind: str = "") -> Channel:
        """Where messages of this group meet, and of this kind of member where others must not take them."""
        if group is None:
            return Channel(kind)
        ranks = tuple(sorted(self.ranks_of(group)))
        build = self.transport().build_of(ranks, None if isinstance(group, (tuple, list)) else group)
        whole = len(ranks) == self.get_world_size() and not build
        return Channel(kind) if whole else Channel(kind, ranks, build)

    def get_rank(self) -> int:
        """Global rank of the caller."""
        return self.transport().rank

    def get_world_size(self) -> int:
        """Number of ranks in the world."""
        return self.transport().world_size

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        """Global ranks of ``group``, in its order."""
        return list(self.ranks_of(group))

    def get_group_local_rank(self, group: Any = None) -> int:
        """Position of the caller in ``group``.

        Raises:
            MeshError: (a ValueError) the caller is not in it.
        """
        ranks, rank = self.ranks_of(group), self.get_rank()
        if rank not in ranks:
            msg = f"get_group_local_rank: rank {rank} is not in the group of ranks {list(ranks)}"
            raise MeshError(msg)
        return ranks.index(rank)

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        """Global rank of position ``group_rank`` in ``group``.

        Raises:
            MeshError: (a ValueError) the group has no such position.
        """
        ranks = self.ranks_of(group)
        if not is_integer(group_rank) or not 0 <= group_rank < len(ranks):
            msg = f"get_global_rank: group_rank {group_rank!r} is outside the group of ranks {list(ranks)}"
            raise MeshError(msg)
        return ranks[group_rank]

    def get_backend(self, group: Any = None) -> str:
        """Name of the engine that serves ``group``: gloo, nccl, hccl, simulated or single."""
        self.ranks_of(group)
        return self.transport().backend

"""Facet *identity*: ranks, positions in groups, and backends. ``group=None`` is the world everywhere."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import MeshError, WorldNotJoinedError
from hyper_parallel.transport.base import Channel

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks, Transport

__all__ = ["IdentityFacet", "distinct_ranks", "is_integer"]


def is_integer(value: Any) -> bool:
    """Return True for an integer of Python or NumPy; not for booleans, nor for floats such as 1.0."""
    if isinstance(value, bool):
        return False
    try:
        index(value)
    except TypeError:
        return False
    return True


def distinct_ranks(rank_list: Any, world_size: int) -> Ranks | None:
    """Return ranks as plain integers in their order, or None if there are none, or one repeats or does not exist."""
    listed = tuple(rank_list) if isinstance(rank_list, Iterable) else ()
    if not all(map(is_integer, listed)):
        return None
    ranks = tuple(map(index, listed))
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
        return None
    return ranks


class IdentityFacet(abc.ABC):
    """Facet *identity*: the same on every framework, because the transport implements it."""

    @abc.abstractmethod
    def transport(self) -> Transport:
        """Return the transport of this rank.

        Raises:
            WorldNotJoinedError: (a MeshError) a launcher started this process as one of several ranks, and it has not
                joined their world.
        """

    def ranks_of(self, group: Any = None) -> Ranks:
        """Return the global ranks of a group handle, of a tuple or list of ranks, or of the world.

        Raises:
            MeshError: (a ValueError) not a group of this world, or ranks repeat, lie outside it or are not integers.
        """
        if not isinstance(group, (tuple, list)):
            return self.transport().ranks_of(group)
        ranks = distinct_ranks(group, self.get_world_size())
        if ranks is None:
            msg = f"group {group} must name distinct ranks of the world of {self.get_world_size()}"
            raise MeshError(msg)
        return ranks

    def _channel(self, group: Any, purpose: str = "") -> Channel:
        """Return the channel in ``group`` for messages of one ``purpose``."""
        if group is None:
            return Channel(purpose)
        ranks = tuple(sorted(self.ranks_of(group)))
        build = self.transport().build_of(ranks, None if isinstance(group, (tuple, list)) else group)
        whole = len(ranks) == self.get_world_size() and not build
        return Channel(purpose) if whole else Channel(purpose, ranks, build)

    def get_rank(self) -> int:
        """Return the global rank of the caller; before it has joined its world, the one that the launcher gave it.

        Raises:
            WorldNotJoinedError: (a MeshError) the launcher gave none, as msrun on several machines without --node_rank.
        """
        try:
            return self.transport().rank
        except WorldNotJoinedError as error:
            if error.rank is None:
                raise
            return error.rank

    def get_world_size(self) -> int:
        """Return the number of ranks in the world; before it is joined, the number that the launcher started."""
        try:
            return self.transport().world_size
        except WorldNotJoinedError as error:
            return error.world_size

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        """Return the global ranks of ``group``, in its order."""
        return list(self.ranks_of(group))

    def get_group_local_rank(self, group: Any = None) -> int:
        """Return the position of the caller in ``group``.

        Raises:
            MeshError: (a ValueError) the caller is not in it.
        """
        ranks, rank = self.ranks_of(group), self.get_rank()
        if rank not in ranks:
            msg = f"get_group_local_rank: rank {rank} is not in the group of ranks {list(ranks)}"
            raise MeshError(msg)
        return ranks.index(rank)

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        """Return the global rank at position ``group_rank`` of ``group``.

        Raises:
            MeshError: (a ValueError) the group has no such position.
        """
        ranks = self.ranks_of(group)
        if not is_integer(group_rank) or not 0 <= group_rank < len(ranks):
            msg = f"get_global_rank: group_rank {group_rank!r} is outside the group of ranks {list(ranks)}"
            raise MeshError(msg)
        return ranks[group_rank]

    def get_backend(self, group: Any = None) -> str:
        """Return the name of the engine of ``group``: gloo, nccl, hccl, simulated or single."""
        self.ranks_of(group)
        return self.transport().backend

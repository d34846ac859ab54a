"""Who am I: ranks and groups. ``group=None`` is the whole world everywhere."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import MeshError

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks, Transport

__all__ = ["IdentityFacet"]


class IdentityFacet(abc.ABC):
    """Facet *identity*: the same on every framework, because the transport knows the answers."""

    @abc.abstractmethod
    def transport(self) -> Transport:
        """Who carries the bytes here."""

    def ranks_of(self, group: Any = None) -> Ranks:
        """Global ranks of a group handle, a rank tuple, or the world."""
        if isinstance(group, tuple):
            return group
        if isinstance(group, list):
            return tuple(group)
        return self.transport().ranks_of(group)

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
        if not 0 <= group_rank < len(ranks):
            msg = f"get_global_rank: group_rank {group_rank} is outside the group of ranks {list(ranks)}"
            raise MeshError(msg)
        return ranks[group_rank]

    def get_backend(self, group: Any = None) -> str:
        """Name of the engine that serves ``group``: gloo, nccl, hccl, simulated or single."""
        self.ranks_of(group)
        return self.transport().backend

"""Groups of ranks: created once per set of ranks, looked up, waited on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import MeshError
from hyper_parallel.platform.contract.identity import IdentityFacet

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GroupsFacet"]


class GroupsFacet(IdentityFacet):
    """Facet *groups*, over the transport."""

    def create_group(self, rank_list: Sequence[int]) -> Any:
        """The group of these ranks, whatever their order in the list; built on first use.

        Raises:
            MeshError: (a ValueError) ranks repeat or lie outside the world.
        """
        ranks = tuple(sorted(rank_list))
        world = self.get_world_size()
        if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= world:
            msg = f"create_group: rank_list {list(rank_list)} must name different ranks of the world of {world}"
            raise MeshError(msg)
        return self.transport().group(ranks)

    def barrier(self, group: Any = None) -> None:
        """Return once every member of ``group`` has called it."""
        self.transport().barrier(self.ranks_of(group))

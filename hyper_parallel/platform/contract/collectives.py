"""Collectives without autograd, on plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.identity import IdentityFacet

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks

__all__ = ["CollectivesFacet"]


class CollectivesFacet(IdentityFacet):
    """Facet *collectives*: results are new tensors, reductions are computed in rank order."""

    def all_reduce(self, data: Any, group_info: Any = None, async_op: bool = False, *, op: str = "sum") -> Any:
        """Reduction of every member's ``data`` (equal shapes), on every member."""
        self._only_blocking("all_reduce", async_op=async_op)
        return self.transport().all_reduce(data, op, self.ranks_of(group_info))

    def all_gather_into_tensor(self, data: Any, group_info: Any = None, async_op: bool = False) -> Any:
        """Every member's ``data`` (equal shapes) concatenated along dim 0."""
        self._only_blocking("all_gather_into_tensor", async_op=async_op)
        ranks = self.ranks_of(group_info)
        parts = self.transport().all_gather(data, ranks, [tuple(data.shape)] * len(ranks))
        return self._cat(parts, 0)

    def reduce_scatter_tensor(
        self, data: Any, group_info: Any = None, async_op: bool = False, *, op: str = "sum"
    ) -> Any:
        """This member's slice (along dim 0) of the reduction of every member's ``data``.

        Raises:
            ValueError: dim 0 does not divide by the number of members.
        """
        self._only_blocking("reduce_scatter_tensor", async_op=async_op)
        ranks = self.ranks_of(group_info)
        return self.transport().reduce_scatter(self._rows(data, ranks), op, ranks)

    def broadcast(self, data: Any, src: int, group: Any = None, async_op: bool = False) -> Any:
        """The ``data`` of global rank ``src``."""
        self._only_blocking("broadcast", async_op=async_op)
        return self.transport().broadcast(data, src, self.ranks_of(group))

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list`` with every member's picklable ``obj``."""
        object_list[:] = self.transport().all_gather_object(obj, self.ranks_of(group))

    def _only_blocking(self, member: str, *, async_op: bool) -> None:
        if async_op:
            backend = self.transport().backend
            msg = f"{member}: async_op=True is not served by the {backend} transport; use async_op=False"
            raise UnsupportedOnBackend(msg)

    def _rows(self, data: Any, ranks: Ranks) -> list[Any]:
        rows, rest = divmod(data.shape[0], len(ranks))
        if rest:
            msg = f"reduce_scatter_tensor: dim 0 of size {data.shape[0]} does not divide by {len(ranks)} ranks"
            raise ValueError(msg)
        return [data[rows * index : rows * (index + 1)] for index in range(len(ranks))]

    def _cat(self, parts: list[Any], dim: int) -> Any:
        raise NotImplementedError

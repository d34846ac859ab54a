"""Collectives without autograd, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.contract.identity import is_integer
from hyper_parallel.platform.contract.messages import MessagesFacet
from hyper_parallel.transport.work import Pending

__all__ = ["CollectivesFacet"]


class CollectivesFacet(MessagesFacet):
    """Facet *collectives*: results are new tensors, reductions are computed in rank order.

    With ``async_op=True`` a call returns before completion, with ``(output, handle)``: ``handle.wait()``, once, fills
    ``output`` and returns it. Inputs must not be written before that. ``group`` is a handle, a tuple or list of
    global ranks, or None for the world; results are in the order in which it names its members.
    """

    def all_reduce(self, data: Any, group_info: Any = None, async_op: bool = False, *, op: str = "sum") -> Any:
        """Reduction of every member's ``data`` (equal shapes), on every member."""
        ranks = self.ranks_of(group_info)
        self._plain("all_reduce", data)
        if not async_op:
            return self._blocking("all_reduce", "all_reduce", data, ranks, op)
        return self._in_flight(self._started("all_reduce", "all_reduce", data, ranks, op), data, tuple(data.shape))

    def all_gather_into_tensor(self, data: Any, group_info: Any = None, async_op: bool = False) -> Any:
        """Every member's ``data`` (equal shapes) concatenated along dim 0.

        Raises:
            ValueError: ``data`` has no dim.
        """
        ranks = self.ranks_of(group_info)
        self._plain("all_gather_into_tensor", data)
        if not len(data.shape):
            msg = "all_gather_into_tensor: the tensor has no dim along which to concatenate; reshape it to (1,)"
            raise ValueError(msg)
        if not async_op:
            return self._cat(self._blocking("all_gather_into_tensor", "all_gather", data, ranks), 0)
        pending = self._started("all_gather_into_tensor", "all_gather", data, ranks)
        whole = (len(ranks) * data.shape[0], *tuple(data.shape)[1:])
        return self._in_flight(pending.then(lambda parts: self._cat(parts, 0)), data, whole)

    def reduce_scatter_tensor(
        self, data: Any, group_info: Any = None, async_op: bool = False, *, op: str = "sum"
    ) -> Any:
        """This member's slice (along dim 0) of the reduction of every member's ``data``.

        Raises:
            ValueError: dim 0 does not divide by the number of members.
        """
        ranks = self.ranks_of(group_info)
        chunks = self._rows("reduce_scatter_tensor", data, ranks)
        if not async_op:
            return self._blocking("reduce_scatter_tensor", "reduce_scatter", data, ranks, op, chunks)
        pending = self._started("reduce_scatter_tensor", "reduce_scatter", data, ranks, op)
        return self._in_flight(pending, data, tuple(chunks[0].shape))

    def broadcast(self, data: Any, src: int, group: Any = None, async_op: bool = False) -> Any:
        """The ``data`` of global rank ``src``.

        Raises:
            CollectiveMismatchError: ``src`` is no member of ``group``.
        """
        ranks = self.ranks_of(group)
        if not is_integer(src) or src not in ranks:
            msg = f"broadcast from rank {src!r}, which is not among ranks {ranks}; src is a global rank"
            raise CollectiveMismatchError(msg)
        self._plain("broadcast", data)
        if not async_op:
            return self._blocking("broadcast", "broadcast", data, ranks, int(src))
        return self._in_flight(self._started("broadcast", "broadcast", data, ranks, int(src)), data, tuple(data.shape))

    def all_to_all_single(
        self, input_tensor: Any, output_shape: Sequence[int], group: Any = None, async_op: bool = False
    ) -> tuple[Any, Any]:
        """Equal slices along dim 0, one to each member; what arrives, in the members' order, in ``output_shape``.

        Returns:
            the output, and its handle (None without ``async_op``).

        Raises:
            ValueError: dim 0 does not divide by the number of members, or the sizes do not give ``output_shape``.
        """
        ranks = self.ranks_of(group)
        chunks = self._rows("all_to_all_single", input_tensor, ranks)
        shape = self._of_equal_volume("all_to_all_single", input_tensor, output_shape)
        if not async_op:
            parts = self._blocking("all_to_all_single", "all_to_all", input_tensor, ranks, None, chunks)
            return self.reshape(self._cat(parts, 0), shape), None
        pending = self._started("all_to_all_single", "all_to_all", input_tensor, ranks)
        joined = pending.then(lambda parts: self.reshape(self._cat(parts, 0), shape))
        output, handle = self._in_flight(joined, input_tensor, shape)
        return output, handle

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list`` with every member's picklable ``obj``."""
        ranks = self.ranks_of(group)
        self._agree_without("all_gather_object", ranks)
        object_list[:] = self.transport().all_gather_object(obj, ranks)

    def _in_flight(self, pending: Pending, like: Any, shape: tuple[int, ...]) -> tuple[Any, Pending]:
        """The output that ``pending`` will fill, and its handle."""
        output = pending.output
        if output is None:
            output = self.new_tensor(shape, like.dtype, self.device_of(like))
        return output, pending.then(lambda result: output if result is output else self.fill_(output, result), output)

    @staticmethod
    def _of_equal_volume(member: str, data: Any, output_shape: Any) -> tuple[int, ...]:
        """``output_shape``, which has as many elements as ``data``."""
        shape = tuple(output_shape)
        if not all(is_integer(size) and size >= 0 for size in shape) or math.prod(shape) != math.prod(data.shape):
            msg = f"{member}: an input of {list(data.shape)} gives no output of {list(shape)}"
            raise ValueError(msg)
        return tuple(map(int, shape))

    def _cat(self, parts: list[Any], dim: int) -> Any:
        raise NotImplementedError

"""Collectives without autograd, on plain tensors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.contract.agreement import AgreementFacet
from hyper_parallel.platform.contract.identity import is_integer
from hyper_parallel.transport.work import Work

__all__ = ["CollectivesFacet"]

_LAST_TAG = 2**31 - 1


class CollectivesFacet(AgreementFacet):
    """Facet *collectives*: results are new tensors, and reductions are computed in rank order.

    With ``async_op=True`` a call returns ``(output, handle)`` before completion: ``handle.wait()``, to be called once,
    fills ``output`` and returns it. Inputs must not be written before that. ``group`` is a handle, a tuple or list of
    global ranks, or None for the world; results are in the order of its members.

    A message is matched to the receive with the same tag, group and function; messages for which all three are equal
    arrive in the order in which they were sent. NCCL and HCCL have no tags: there, messages between two ranks must be
    received in the order in which they were sent, whatever their tags.
    """

    def all_reduce(self, data: Any, group_info: Any = None, async_op: bool = False, *, op: str = "sum") -> Any:
        """Reduce the members' ``data``, of equal shapes, on every member.

        Args:
            data: a plain tensor.
            group_info: the members.
            async_op: return ``(output, handle)`` before completion.
            op: sum, avg, max, min, prod, all or any.

        Raises:
            CollectiveMismatchError: members call different collectives, or the caller is not a member.
            TypeError: the reduction is unknown, or is an average of integers.
        """
        ranks = self.ranks_of(group_info)
        self._plain("all_reduce", data)
        if not async_op:
            return self._blocking("all_reduce", "all_reduce", data, ranks, op)
        return self._in_flight(self._started("all_reduce", "all_reduce", data, ranks, op), data, tuple(data.shape))

    def all_gather_into_tensor(self, data: Any, group_info: Any = None, async_op: bool = False) -> Any:
        """Concatenate the members' ``data``, of equal shapes, along dim 0.

        Raises:
            ValueError: ``data`` is a 0-d tensor.
        """
        ranks = self.ranks_of(group_info)
        self._plain("all_gather_into_tensor", data)
        if not len(data.shape):
            msg = "all_gather_into_tensor: a 0-d tensor cannot be concatenated; reshape it to (1,)"
            raise ValueError(msg)
        if not async_op:
            return self._cat(self._blocking("all_gather_into_tensor", "all_gather", data, ranks), 0)
        work = self._started("all_gather_into_tensor", "all_gather", data, ranks)
        whole = (len(ranks) * data.shape[0], *tuple(data.shape)[1:])
        return self._in_flight(work.then(lambda parts: self._cat(parts, 0)), data, whole)

    def reduce_scatter_tensor(
        self, data: Any, group_info: Any = None, async_op: bool = False, *, op: str = "sum"
    ) -> Any:
        """Reduce the members' ``data`` and return this member's slice along dim 0.

        Raises:
            ValueError: dim 0 is not divisible by the number of members.
        """
        ranks = self.ranks_of(group_info)
        rows = self._rows("reduce_scatter_tensor", data, ranks)
        if not async_op:
            return self._blocking("reduce_scatter_tensor", "reduce_scatter", data, ranks, op)
        work = self._started("reduce_scatter_tensor", "reduce_scatter", data, ranks, op)
        return self._in_flight(work, data, (rows, *tuple(data.shape)[1:]))

    def broadcast(self, data: Any, src: int, group: Any = None, async_op: bool = False) -> Any:
        """Return the ``data`` of global rank ``src``.

        Raises:
            CollectiveMismatchError: ``src`` is not a member of ``group``.
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
        """Send an equal slice along dim 0 to each member; return the received slices, in the members' order.

        Returns:
            the output of shape ``output_shape``, and its handle (None without ``async_op``).

        Raises:
            ValueError: dim 0 is not divisible by the number of members, or the input cannot have ``output_shape``.
        """
        ranks = self.ranks_of(group)
        self._rows("all_to_all_single", input_tensor, ranks)
        shape = self._of_equal_volume("all_to_all_single", input_tensor, output_shape)
        if not async_op:
            received = self._blocking("all_to_all_single", "all_to_all", input_tensor, ranks)
            return self.reshape(received, shape), None
        work = self._started("all_to_all_single", "all_to_all", input_tensor, ranks)
        output, handle = self._in_flight(work.then(lambda flat: self.reshape(flat, shape)), input_tensor, shape)
        return output, handle

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list`` with the picklable objects ``obj`` of all members, in the group's order."""
        ranks = self.ranks_of(group)
        self._agree("all_gather_object", None, ranks)
        object_list[:] = self.transport().all_gather_object(obj, ranks)

    def isend(self, tensor: Any, dst: int, group: Any = None, tag: int = 0) -> Work:
        """Start sending ``tensor`` to global rank ``dst``; wait for the handle before writing to ``tensor``.

        Raises:
            CollectiveMismatchError: ``dst`` is this rank or not in ``group``.
            ValueError: ``tag`` is not an integer from 0 to 2**31 - 1.
        """
        self._plain("isend", tensor)
        tag = _checked_tag("isend", tag)
        peer = self._peer("isend", dst, group)
        return self.transport().start("send", tensor, peer, tag, self._channel(group))

    def irecv(self, tensor: Any, src: int, group: Any = None, tag: int = 0) -> Work:
        """Start receiving into ``tensor`` from global rank ``src``; ``wait()`` fills and returns it.

        Raises:
            CollectiveMismatchError: ``src`` is this rank or not in ``group``.
            ValueError: ``tag`` is not an integer from 0 to 2**31 - 1, or ``tensor`` cannot be written.
        """
        self._plain("irecv", tensor)
        tag = _checked_tag("irecv", tag)
        refusal = self._unwritable(tensor) or _overlap(tensor.shape, tensor.stride())
        if refusal:
            msg = f"irecv: cannot receive into this tensor: {refusal}"
            raise ValueError(msg)
        peer, transport, channel = self._peer("irecv", src, group), self.transport(), self._channel(group)
        work = transport.start("recv", tensor, peer, tag, channel)
        handle = work.then(lambda value: self.fill_(tensor, value), tensor)
        transport.receiving.setdefault(channel, WeakKeyDictionary())[handle] = f"from rank {peer} with tag {tag}"
        return handle

    def send_object_list(self, obj_list: Sequence[Any], dst: int, group: Any = None) -> None:
        """Send picklable objects to global rank ``dst``."""
        import numpy as np

        peer, transport = self._peer("send_object_list", dst, group), self.transport()
        payload = np.frombuffer(pickle.dumps(list(obj_list)), np.uint8)
        channel = self._channel(group, "objects")
        transport.send(self.from_numpy(np.array([len(payload)], np.int64)), peer, 0, channel)
        transport.send(self.from_numpy(payload), peer, 0, channel)

    def recv_object_list(self, obj_list: list[Any], src: int, group: Any = None) -> int:
        """Fill ``obj_list`` with the objects that global rank ``src`` sent by :meth:`send_object_list`; return ``src``.

        Raises:
            CollectiveMismatchError: the list that was sent and ``obj_list`` have different lengths.
        """
        import numpy as np

        peer, transport = self._peer("recv_object_list", src, group), self.transport()
        channel = self._channel(group, "objects")
        size = transport.recv(self.from_numpy(np.zeros(1, np.int64)), peer, 0, channel)
        count = int(self.tensor_to_numpy(size)[0])
        payload = transport.recv(self.from_numpy(np.zeros(count, np.uint8)), peer, 0, channel)
        objects = pickle.loads(self.tensor_to_numpy(payload).tobytes())  # noqa: S301 - data from a rank of this program
        if len(objects) != len(obj_list):
            msg = f"recv_object_list: rank {src} sent {len(objects)} objects, obj_list has room for {len(obj_list)}"
            raise CollectiveMismatchError(msg)
        obj_list[:] = objects
        return src

    def _in_flight(self, work: Work, like: Any, shape: tuple[int, ...]) -> tuple[Any, Work]:
        """Return the output that ``work`` will fill, and its handle."""
        output = work.output
        if output is None:
            output = self.new_tensor(shape, like.dtype, self.device_of(like))
        return output, work.then(lambda result: output if result is output else self.fill_(output, result), output)

    @staticmethod
    def _of_equal_volume(member: str, data: Any, output_shape: Any) -> tuple[int, ...]:
        """Return ``output_shape``, after a check that its number of elements is that of ``data``."""
        shape = tuple(output_shape)
        if not all(is_integer(size) and size >= 0 for size in shape) or math.prod(shape) != math.prod(data.shape):
            msg = f"{member}: an input of {list(data.shape)} cannot be reshaped to {list(shape)}"
            raise ValueError(msg)
        return tuple(map(int, shape))

    def _cat(self, parts: list[Any], dim: int) -> Any:
        raise NotImplementedError

    def _peer(self, member: str, peer: int, group: Any) -> int:
        ranks = self.ranks_of(group)
        if not is_integer(peer) or peer not in ranks or peer == self.get_rank():
            msg = (
                f"{member}: rank {peer} must be another rank of the group {list(ranks)}; this is rank {self.get_rank()}"
            )
            raise CollectiveMismatchError(msg)
        return int(peer)


def _checked_tag(member: str, tag: Any) -> int:
    if not is_integer(tag) or not 0 <= tag <= _LAST_TAG:
        msg = f"{member}: tag {tag!r} must be an integer from 0 to {_LAST_TAG}, the same on both sides"
        raise ValueError(msg)
    return int(tag)


def _overlap(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return why a strided tensor whose elements overlap in memory cannot be received into; empty if none overlap."""
    import numpy as np

    reach, disjoint = 0, True
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    for stride, size in dims:
        disjoint, reach = disjoint and stride > reach, reach + stride * (size - 1)
    if disjoint or 0 in shape:
        return ""
    offsets = sum(np.ix_(*(np.arange(size) * stride for stride, size in dims)), np.zeros((), np.int64))
    if np.unique(offsets).size == offsets.size:
        return ""
    return f"elements of {list(shape)} overlap in memory (strides {list(strides)}); receive into its contiguous()"

"""Messages from one rank to another, without autograd."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.contract.agreed import AgreedFacet
from hyper_parallel.platform.contract.identity import is_integer
from hyper_parallel.transport.work import Pending

__all__ = ["MessagesFacet"]

_LAST_TAG = 2**31 - 1


class MessagesFacet(AgreedFacet):
    """The part of facet *collectives* that has one sender and one receiver.

    A message meets the receive of its tag, group and kind of member; those that have all three in common arrive in the
    order in which they were sent.
    """

    def isend(self, tensor: Any, dst: int, group: Any = None, tag: int = 0) -> Pending:
        """Begin to send ``tensor`` to global rank ``dst``; a handle to wait for before it is written again.

        Raises:
            CollectiveMismatchError: ``dst`` is this rank or not in ``group``.
            ValueError: ``tag`` is no integer from 0 to 2**31 - 1.
        """
        self._plain("isend", tensor)
        tag = _checked("isend", tag)
        peer = self._peer("isend", dst, group)
        return self.transport().start("send", tensor, peer, tag, self._channel(group))

    def irecv(self, tensor: Any, src: int, group: Any = None, tag: int = 0) -> Pending:
        """Begin to receive into ``tensor`` from global rank ``src``; ``wait()`` fills and returns it.

        Raises:
            CollectiveMismatchError: ``src`` is this rank or not in ``group``.
            ValueError: ``tag`` is no integer from 0 to 2**31 - 1, or ``tensor`` cannot be written.
        """
        self._plain("irecv", tensor)
        tag = _checked("irecv", tag)
        refusal = self._unwritable(tensor) or _shared(tensor.shape, tensor.stride())
        if refusal:
            msg = f"irecv: nothing can be received into this tensor: {refusal}"
            raise ValueError(msg)
        peer, transport, channel = self._peer("irecv", src, group), self.transport(), self._channel(group)
        pending = transport.start("recv", tensor, peer, tag, channel)
        handle = pending.then(lambda value: self.fill_(tensor, value), tensor)
        transport.receiving.setdefault(channel, WeakKeyDictionary())[handle] = f"from rank {peer} with tag {tag}"
        return handle

    def send_object_list(self, obj_list: Sequence[Any], dst: int, group: Any = None) -> None:
        """Send picklable objects to global rank ``dst``."""
        import numpy as np

        peer, transport = self._peer("send_object_list", dst, group), self.transport()
        payload = np.frombuffer(pickle.dumps(list(obj_list)), np.uint8)
        where = self._channel(group, "objects")
        transport.send(self.from_numpy(np.array([len(payload)], np.int64)), peer, 0, where)
        transport.send(self.from_numpy(payload), peer, 0, where)

    def recv_object_list(self, obj_list: list[Any], src: int, group: Any = None) -> int:
        """Fill ``obj_list`` with what global rank ``src`` sent by :meth:`send_object_list`; returns ``src``.

        Raises:
            CollectiveMismatchError: the list that was sent has another length than ``obj_list``.
        """
        import numpy as np

        peer, transport = self._peer("recv_object_list", src, group), self.transport()
        where = self._channel(group, "objects")
        size = transport.recv(self.from_numpy(np.zeros(1, np.int64)), peer, 0, where)
        count = int(self.tensor_to_numpy(size)[0])
        payload = transport.recv(self.from_numpy(np.zeros(count, np.uint8)), peer, 0, where)
        found = pickle.loads(self.tensor_to_numpy(payload).tobytes())  # noqa: S301 - a rank of this very program
        if len(found) != len(obj_list):
            msg = f"recv_object_list: rank {src} sent {len(found)} objects, obj_list has room for {len(obj_list)}"
            raise CollectiveMismatchError(msg)
        obj_list[:] = found
        return src

    def _peer(self, member: str, peer: int, group: Any) -> int:
        ranks = self.ranks_of(group)
        if not is_integer(peer) or peer not in ranks or peer == self.get_rank():
            msg = (
                f"{member}: rank {peer} must be another rank of the group {list(ranks)}; this is rank {self.get_rank()}"
            )
            raise CollectiveMismatchError(msg)
        return int(peer)


def _checked(member: str, tag: Any) -> int:
    if not is_integer(tag) or not 0 <= tag <= _LAST_TAG:
        msg = f"{member}: tag {tag!r} is no integer from 0 to {_LAST_TAG}; give both sides the same one, or none at all"
        raise ValueError(msg)
    return int(tag)


def _shared(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Words for elements that share memory, of which all but one would be lost."""
    import numpy as np

    reach, apart = 0, True
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    for stride, size in dims:
        apart, reach = apart and stride > reach, reach + stride * (size - 1)
    if apart or 0 in shape:
        return ""
    places = sum(np.ix_(*(np.arange(size) * stride for stride, size in dims)), np.zeros((), np.int64))
    if np.unique(places).size == places.size:
        return ""
    return f"of {list(shape)} elements share memory, strides are {list(strides)}; receive into its contiguous()"

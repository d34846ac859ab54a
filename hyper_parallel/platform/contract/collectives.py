"""Collectives without autograd, on plain tensors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, NotPlainError, short_dtype
from hyper_parallel.platform.contract.agreement import LABEL, Statement, Transfer, compare, label, text_of
from hyper_parallel.platform.contract.identity import IdentityFacet, is_integer
from hyper_parallel.platform.contract.tensors import TensorsFacet
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.pending import Pending

__all__ = ["CollectivesFacet"]


class CollectivesFacet(IdentityFacet, TensorsFacet):
    """Facet *collectives*: results are new tensors, reductions are computed in rank order.

    With ``async_op=True`` a call returns before completion, with ``(output, handle)``: ``handle.wait()``, once, fills
    ``output`` and returns it. Inputs must not be written before that. ``group`` is a handle, a tuple or list of
    global ranks, or None for the world; results are in the order in which it names its members.
    """

    platform_type: str

    def all_reduce(self, data: Any, group_info: Any = None, async_op: bool = False, *, op: str = "sum") -> Any:
        """Reduction of every member's ``data`` (equal shapes), on every member."""
        ranks = self.ranks_of(group_info)
        self._plain("all_reduce", data)
        if not async_op:
            self._agree("all_reduce", data, ranks, op)
            return self.transport().all_reduce(data, op, ranks)
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
            self._agree("all_gather_into_tensor", data, ranks)
            return self._cat(self.transport().all_gather(data, ranks, [tuple(data.shape)] * len(ranks)), 0)
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
            self._agree("reduce_scatter_tensor", data, ranks, op)
            return self.transport().reduce_scatter(chunks, op, ranks)
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
            self._agree("broadcast", data, ranks, f"src={src}")
            return self.transport().broadcast(data, src, ranks)
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
            self._agree("all_to_all_single", input_tensor, ranks)
            shapes = [tuple(chunks[0].shape)] * len(ranks)
            return self.reshape(self._cat(self.transport().all_to_all(chunks, ranks, shapes), 0), shape), None
        pending = self._started("all_to_all_single", "all_to_all", input_tensor, ranks)
        joined = pending.then(lambda parts: self.reshape(self._cat(parts, 0), shape))
        output, handle = self._in_flight(joined, input_tensor, shape)
        return output, handle

    def isend(self, tensor: Any, dst: int, group: Any = None, tag: int = 0) -> Pending:
        """Begin to send ``tensor`` to global rank ``dst``; a handle to wait for before it is written again.

        Raises:
            CollectiveMismatchError: ``dst`` is this rank or not in ``group``.
        """
        self._plain("isend", tensor)
        return self.transport().start("send", tensor, self._peer("isend", dst, group), tag)

    def irecv(self, tensor: Any, src: int, group: Any = None, tag: int = 0) -> Pending:
        """Begin to receive into ``tensor`` from global rank ``src``; ``wait()`` fills and returns it.

        Raises:
            CollectiveMismatchError: ``src`` is this rank or not in ``group``.
        """
        self._plain("irecv", tensor)
        pending = self.transport().start("recv", tensor, self._peer("irecv", src, group), tag)
        return pending.then(lambda value: self.fill_(tensor, value), tensor)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list`` with every member's picklable ``obj``."""
        object_list[:] = self.transport().all_gather_object(obj, self.ranks_of(group))

    def send_object_list(self, obj_list: Sequence[Any], dst: int, group: Any = None) -> None:
        """Send picklable objects to global rank ``dst``."""
        import numpy as np

        peer, transport = self._peer("send_object_list", dst, group), self.transport()
        payload = np.frombuffer(pickle.dumps(list(obj_list)), np.uint8)
        transport.send(self.from_numpy(np.array([len(payload)], np.int64)), peer)
        transport.send(self.from_numpy(payload), peer)

    def recv_object_list(self, obj_list: list[Any], src: int, group: Any = None) -> int:
        """Fill ``obj_list`` with what global rank ``src`` sent by :meth:`send_object_list`; returns ``src``.

        Raises:
            CollectiveMismatchError: the list that was sent has another length than ``obj_list``.
        """
        import numpy as np

        peer, transport = self._peer("recv_object_list", src, group), self.transport()
        size = transport.recv(self.from_numpy(np.zeros(1, np.int64)), peer)
        count = int(self.tensor_to_numpy(size)[0])
        payload = transport.recv(self.from_numpy(np.zeros(count, np.uint8)), peer)
        found = pickle.loads(self.tensor_to_numpy(payload).tobytes())  # noqa: S301 - a rank of this very program
        if len(found) != len(obj_list):
            msg = f"recv_object_list: rank {src} sent {len(found)} objects, obj_list has room for {len(obj_list)}"
            raise CollectiveMismatchError(msg)
        obj_list[:] = found
        return src

    def _agree(self, member: str, data: Any, ranks: Ranks, *facts: str) -> None:
        """Compare what the members of a blocking collective are about to do, where nobody else would.

        The simulation compares by itself; gloo ends the process, or hands out wrong values, when sizes differ. An
        accelerator's engine is asked for nothing more: there it would cost as much as a small collective.
        """
        transport = self.transport()
        if transport.backend != "gloo" or len(ranks) == 1:
            return
        dtype = short_dtype(data.dtype)
        mine = f"{member}({', '.join((f'{dtype}{list(data.shape)}', *map(str, facts)))})"
        compare(ranks, transport.all_gather_object(mine, ranks))

    def _started(self, member: str, operation: str, data: Any, ranks: Ranks, fact: Any = None) -> Pending:
        """Begin a collective; over gloo members that do different things learn of it when they wait (``agreement``).

        That costs a visit to the store and a second, small collective.
        """
        transport = self.transport()
        if transport.backend != "gloo" or len(ranks) == 1:
            return self._carried(operation, data, ranks, fact)
        mine = Statement(member, operation, _name(data.dtype), tuple(data.shape), fact)
        earlier = transport.claimed(mine.json, ranks)
        first = Statement.parsed(earlier[0]) if earlier else mine
        said = self._said(str(mine), ranks)
        if first != mine:
            data = self.zeros(first.shape, dtype=self.str_to_dtype(first.dtype))
        pending = self._carried(first.operation, data, ranks, first.fact)

        def finish() -> Any:
            told, result = said.wait(), pending.wait()
            compare(ranks, told)
            return result

        return Pending(operation, finish, pending.output if first == mine else None)

    def _said(self, text: str, ranks: Ranks) -> Pending:
        """What every member says, beside a started collective."""
        labels = self.transport().start("all_gather", self.from_numpy(label(text)), ranks, [(LABEL,)] * len(ranks))
        return labels.then(lambda parts: [text_of(self.tensor_to_numpy(one)) for one in parts])

    def _carried(self, operation: str, data: Any, ranks: Ranks, fact: Any) -> Pending:
        """Begin what the transport does."""
        start = self.transport().start
        if operation in ("all_reduce", "broadcast"):
            return start(operation, data, fact, ranks)
        if operation == "all_gather":
            return start(operation, data, ranks, [tuple(data.shape)] * len(ranks))
        chunks = self._rows(operation, data, ranks)
        if operation == "reduce_scatter":
            return start(operation, chunks, fact, ranks)
        return start(operation, chunks, ranks, [tuple(chunks[0].shape)] * len(ranks))

    def _agree_on_rows(self, member: str, data: Any, route: Any) -> None:
        """Compare who sends how many rows, and which, with who expects how many, as :meth:`_agree`."""
        transport = self.transport()
        if transport.backend != "gloo" or len(route.ranks) == 1:
            return
        ranks, route = tuple(sorted(route.ranks)), _by_rank(route)
        found = transport.all_gather_object((_row(member, data), route.sent, route.received), ranks)
        compare(ranks, [one for one, *_ in found])
        _compare_rows(member, ranks, [rows for _, *rows in found])

    def _rows_in_flight(self, member: str, data: Any, route: Any, launch: Callable[[], Any]) -> tuple[Any, Pending]:
        """The same for what is launched, as :meth:`_started`: the output of ``launch``, and what to wait for."""
        transport = self.transport()
        if transport.backend != "gloo" or len(route.ranks) == 1:
            output = launch()
            return output, route.launched[0]
        import numpy as np

        own, route = route, _by_rank(route)
        ranks = route.ranks
        mine = Transfer(
            ranks.index(self.get_rank()), route.sent, route.received, _name(data.dtype), tuple(data.shape)[1:]
        )
        fitting = mine.after([Transfer.parsed(one) for one in transport.claimed(mine.json, ranks)])
        rows = self.from_numpy(np.array([route.sent, route.received], np.int64))
        said = self._said(_row(member, data), ranks)
        counted = transport.start("all_gather", rows, ranks, [(2, len(ranks))] * len(ranks))
        if fitting == mine:
            output, pending = launch(), own.launched[0]
        else:
            output = self.zeros((sum(route.received), *mine.rest), dtype=data.dtype)
            zeros = self.zeros((sum(fitting.sent), *fitting.rest), dtype=self.str_to_dtype(fitting.dtype))
            other = route._replace(sent=fitting.sent, received=fitting.received)
            pending = transport.start("all_to_all", *other.arguments(zeros))

        def finish() -> Any:
            told, counts, result = said.wait(), counted.wait(), pending.wait()
            compare(ranks, told)
            _compare_rows(member, ranks, [self.tensor_to_numpy(one).tolist() for one in counts])
            return result

        return output, Pending(member, finish, pending.output)

    def _in_flight(self, pending: Pending, like: Any, shape: tuple[int, ...]) -> tuple[Any, Pending]:
        """The output that ``pending`` will fill, and its handle."""
        output = pending.output
        if output is None:
            output = self.new_tensor(shape, like.dtype, self.device_of(like))
        return output, pending.then(lambda result: output if result is output else self.fill_(output, result), output)

    def _peer(self, member: str, peer: int, group: Any) -> int:
        ranks = self.ranks_of(group)
        if not is_integer(peer) or peer not in ranks or peer == self.get_rank():
            msg = (
                f"{member}: rank {peer} must be another rank of the group {list(ranks)}; this is rank {self.get_rank()}"
            )
            raise CollectiveMismatchError(msg)
        return int(peer)

    def _rows(self, member: str, data: Any, ranks: Ranks) -> list[Any]:
        self._plain(member, data)
        size = data.shape[0] if len(data.shape) else 0
        rows, rest = divmod(size, len(ranks))
        if rest or not len(data.shape):
            msg = f"{member}: dim 0 of size {size} does not divide by {len(ranks)} ranks"
            raise ValueError(msg)
        return [data[rows * index : rows * (index + 1)] for index in range(len(ranks))]

    def _plain(self, member: str, data: Any) -> None:
        """Refuse what is no plain tensor: of a DTensor it is not said whether its piece or its whole is meant."""
        if self.is_tensor(data) and not hasattr(data, "full_tensor"):
            return
        msg = f"{member}: expected a plain tensor of {self.platform_type}, got {type(data).__name__}"
        raise NotPlainError(msg + ("; give its to_local()" if hasattr(data, "full_tensor") else ""))

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


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2].lower()


def _row(member: str, data: Any) -> str:
    """What every member's rows must be alike in."""
    return f"{member}(rows of {short_dtype(data.dtype)}{list(data.shape)[1:]})"


def _by_rank(route: Any) -> Any:
    """The same route with members in the order of their numbers: each may name them in an order of its own."""
    order = sorted(range(len(route.ranks)), key=route.ranks.__getitem__)
    put = [tuple(one[place] for place in order) for one in (route.ranks, route.sent, route.received)]
    return route._replace(ranks=put[0], sent=put[1], received=put[2])


def _compare_rows(member: str, ranks: Ranks, found: Sequence[Sequence[Sequence[int]]]) -> None:
    for sender, (sent, _) in enumerate(found):
        for receiver, (_, received) in enumerate(found):
            if sent[receiver] != received[sender]:
                msg = (
                    f"{member}: rank {ranks[sender]} sends {sent[receiver]} rows to rank {ranks[receiver]}, "
                    f"which expects {received[sender]}"
                )
                raise CollectiveMismatchError(msg)

"""A real transport whose every collective is agreed upon first, so that a mistake is an error and never a hang.

Gloo waits for ever when ranks call different collectives, and computes nonsense when they reduce with different
operations. A guarded rank therefore says what it is about to do, exactly as a simulated rank does, and starts the real
collective only when all members have said the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.transport.base import (
    WORLD,
    Channel,
    Ranks,
    Shape,
    Transport,
    TransportOver,
    check_ranks,
    check_reduction,
)
from hyper_parallel.transport.checks.fingerprint import Call, Message, call_site
from hyper_parallel.transport.simulated import Endpoint, HostOps
from hyper_parallel.transport.work import Pending

__all__ = ["GuardedTransport"]

Facts = tuple[tuple[str, Any], ...]


class GuardedTransport(TransportOver):
    """``inner`` with a check in front: ``ops`` describes tensors, ``endpoint`` asks the coordinator.

    Raises, from every method, :class:`CollectiveMismatchError` when members do not do the same thing.
    """

    def __init__(self, inner: Transport, ops: HostOps, endpoint: Endpoint) -> None:
        super().__init__(inner)
        self._ops = ops
        self._endpoint = endpoint
        self._tickets = 0
        self._posted: dict[tuple[int, int, int, Channel], deque[Message]] = {}

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.all_reduce`."""
        self._agree(self._all_reduce(x, op, ranks))
        return self._inner.all_reduce(x, op, ranks)

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_gather`."""
        self._agree(self._all_gather(x, ranks, shapes))
        return self._inner.all_gather(x, ranks, shapes)

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.reduce_scatter`."""
        self._agree(self._reduce_scatter(chunks, op, ranks))
        return self._inner.reduce_scatter(chunks, op, ranks)

    def all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_to_all`."""
        self._agree(self._all_to_all(chunks, ranks, shapes))
        return self._inner.all_to_all(chunks, ranks, shapes)

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :meth:`Transport.broadcast`."""
        self._agree(self._broadcast(x, src, ranks))
        return self._inner.broadcast(x, src, ranks)

    def start(self, operation: str, *args: Any) -> Pending:
        """See :meth:`Transport.start`; what was started is agreed upon when it is waited for."""
        if operation == "send":
            self._announce(*args)
            return self._inner.start(operation, *args)
        if operation == "recv":
            return self._post(*args)
        calls: dict[str, Callable[..., Call]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "broadcast": self._broadcast,
        }
        call = calls[operation](*args)
        if len(call.ranks) == 1:
            return self._inner.start(operation, *args)
        ticket = self._begin(call)
        pending = self._inner.start(operation, *args)

        def finish() -> Any:
            self._endpoint.wait(ticket)
            return pending.wait()

        return Pending(operation, finish, pending.output)

    def send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """See :meth:`Transport.send`."""
        self._announce(x, dst, tag, channel)
        self._inner.send(x, dst, tag, channel)

    def recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Any:
        """See :meth:`Transport.recv`."""
        return self._post(like, src, tag, channel).wait()

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        self.agree("all_gather_object", ranks, ())
        return self._inner.all_gather_object(obj, ranks)

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        self.agree("barrier", ranks, ())
        self._inner.barrier(ranks)

    def agree(
        self,
        operation: str,
        ranks: Ranks,
        facts: Facts,
        sends: tuple[Shape, ...] | None = None,
        expects: tuple[Shape, ...] | None = None,
        *,
        wait: bool = True,
        beneath: str = "",
    ) -> None:
        """Say what this rank is about to do; return once every member is, or at once without ``wait``.

        Nobody asks how a call without ``wait`` went: if members disagree, the world ends at once.

        Args:
            operation: name of the collective.
            ranks: its members.
            facts: on which all members must agree.
            sends: shape of what goes to each member, where they may differ between members.
            expects: shape of what is to come from each member.
            wait: whether this rank goes on only when all members have come.
            beneath: folder of code that is no caller, since the engine calls itself there.
        """
        call = self._call(operation, ranks, facts, sends, expects, beneath)
        call.awaited = wait
        if wait:
            self._agree(call)
        elif len(ranks) > 1:
            self._begin(call)

    # -- what each collective says ----------------------------------------------------------------------------------

    def _all_reduce(self, x: Any, op: str, ranks: Ranks) -> Call:
        check_reduction(op, inexact=self._ops.inexact(x))
        return self._call("all_reduce", ranks, (*self._facts(x), ("reduction", op)))

    def _all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> Call:
        return self._call("all_gather", ranks, (("dtype", self._ops.dtype(x)), ("shapes", _tuples(shapes))))

    def _reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Call:
        check_reduction(op, inexact=self._ops.inexact(chunks[0]))
        facts = (("dtype", self._ops.dtype(chunks[0])), ("shapes", self._shapes(chunks)), ("reduction", op))
        return self._call("reduce_scatter", ranks, facts)

    def _all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> Call:
        facts = (("dtype", self._ops.dtype(chunks[0])),)
        return self._call("all_to_all", ranks, facts, self._shapes(chunks), _tuples(shapes))

    def _broadcast(self, x: Any, src: int, ranks: Ranks) -> Call:
        return self._call("broadcast", ranks, (*self._facts(x), ("src", src)))

    def _call(
        self,
        operation: str,
        ranks: Ranks,
        facts: Facts,
        sends: tuple[Shape, ...] | None = None,
        expects: tuple[Shape, ...] | None = None,
        beneath: str = "",
    ) -> Call:
        check_ranks(ranks, self.rank, self.world_size)
        return Call(operation, ranks, facts, [None] * len(ranks), call_site(beneath), sends, expects)

    def _facts(self, x: Any) -> Facts:
        return (("shape", self._ops.shape(x)), ("dtype", self._ops.dtype(x)))

    def _shapes(self, chunks: Sequence[Any]) -> tuple[Shape, ...]:
        return tuple(self._ops.shape(chunk) for chunk in chunks)

    # -- how it is agreed upon --------------------------------------------------------------------------------------

    def _agree(self, call: Call) -> None:
        if len(call.ranks) > 1:
            self._endpoint.exchange(call)

    def _begin(self, call: Call) -> int:
        self._tickets += 1
        call.ticket = self._tickets
        self._endpoint.start(call)
        return self._tickets

    def _announce(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        self._endpoint.send(Message(self.rank, dst, tag, self._facts(x), call_site(), None, channel))

    def _wish(self, like: Any, src: int, tag: int, channel: Channel) -> Message:
        wish = Message(src, self.rank, tag, self._facts(like), call_site(), None, channel)
        self._posted.setdefault(wish.key, deque()).append(wish)
        return wish

    def _post(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Pending:
        wish = self._wish(like, src, tag, channel)
        pending = self._inner.start("recv", like, src, tag, channel)

        def finish() -> Any:
            self._receive(wish)  # what is refused stays in its place: later receives take it, for nobody, before theirs
            return pending.wait()

        return Pending("recv", finish, pending.output)

    def _receive(self, wish: Message) -> None:
        """Match wishes of one mailbox in the order in which they were made, up to this one."""
        queue = self._posted[wish.key]
        while any(one is wish for one in queue):
            self._endpoint.receive(queue.popleft())


def _tuples(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(tuple(shape) for shape in shapes)

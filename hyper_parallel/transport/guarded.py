"""A real transport whose every collective is agreed upon first, so that a mistake is an error and never a hang.

Gloo waits for ever when ranks call different collectives, and computes nonsense when they reduce with different
operations. A guarded rank therefore says what it is about to do, exactly as a simulated rank does, and starts the real
collective only when all members have said the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Ranks, Shape, Transport
from hyper_parallel.transport.calls import Call, Message, call_site, check_ranks, check_reduction
from hyper_parallel.transport.pending import Pending
from hyper_parallel.transport.simulated import Endpoint, HostOps

__all__ = ["GuardedTransport"]


class GuardedTransport(Transport):
    """``inner`` with a check in front: ``ops`` describes tensors, ``endpoint`` asks the coordinator.

    Raises, from every method, :class:`CollectiveMismatchError` when members do not do the same thing.
    """

    def __init__(self, inner: Transport, ops: HostOps, endpoint: Endpoint) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.backend = inner.backend
        self._inner = inner
        self._ops = ops
        self._endpoint = endpoint
        # What was started and has not run: collectives, and receptions by mailbox, each in the order of starting.
        self._begun: deque[_Begun] = deque()
        self._catching_up = False
        self._posted: dict[tuple[int, int], deque[_Begun]] = {}

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.all_reduce`."""
        check_reduction(op, inexact=self._ops.inexact(x))
        self._agree("all_reduce", ranks, (*self._facts(x), ("reduction", op)))
        return self._inner.all_reduce(x, op, ranks)

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_gather`."""
        self._agree("all_gather", ranks, (("dtype", self._ops.dtype(x)), ("shapes", _tuples(shapes))))
        return self._inner.all_gather(x, ranks, shapes)

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.reduce_scatter`."""
        check_reduction(op, inexact=self._ops.inexact(chunks[0]))
        facts = (("dtype", self._ops.dtype(chunks[0])), ("shapes", self._shapes(chunks)), ("reduction", op))
        self._agree("reduce_scatter", ranks, facts)
        return self._inner.reduce_scatter(chunks, op, ranks)

    def all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_to_all`."""
        facts = (("dtype", self._ops.dtype(chunks[0])),)
        self._agree("all_to_all", ranks, facts, self._shapes(chunks), _tuples(shapes))
        return self._inner.all_to_all(chunks, ranks, shapes)

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :meth:`Transport.broadcast`."""
        self._agree("broadcast", ranks, (*self._facts(x), ("src", src)))
        return self._inner.broadcast(x, src, ranks)

    def send(self, x: Any, dst: int, tag: int = 0) -> None:
        """See :meth:`Transport.send`."""
        self._endpoint.send(Message(self.rank, dst, tag, self._facts(x), call_site()))
        self._inner.send(x, dst, tag)

    def recv(self, like: Any, src: int, tag: int = 0) -> Any:
        """See :meth:`Transport.recv`."""
        return self._post(like, src, tag).wait()

    def start(self, operation: str, *args: Any) -> Pending:
        """See :meth:`Transport.start`.

        Agreement cannot be reached without waiting for the others, so a collective runs when it is waited for, or
        before the next one that is: in the order of starting, which is the same on all its members.
        """
        if operation == "send":
            x, dst, *tag = args
            self._endpoint.send(Message(self.rank, dst, tag[0] if tag else 0, self._facts(x), call_site()))
            return self._inner.start("send", *args)
        if operation == "recv":
            return self._post(*args)
        begun = _Begun(lambda: getattr(self, operation)(*args))
        self._begun.append(begun)
        return Pending(operation, lambda: self._catch_up(begun))

    def _catch_up(self, begun: _Begun | None) -> Any:
        """Run what was started, in its order, up to and with ``begun``, whose result it is; all of it for None."""
        before, self._catching_up = self._catching_up, True
        try:
            if begun is not None:
                return begun.after(self._begun)
            while self._begun:
                self._begun.popleft().run()
        finally:
            self._catching_up = before
        return None

    def _post(self, like: Any, src: int, tag: int = 0) -> Pending:
        wish = Message(src, self.rank, tag, self._facts(like), call_site())

        def receive() -> Any:
            self._endpoint.receive(wish)
            return self._inner.recv(like, src, tag)

        queue = self._posted.setdefault((src, tag), deque())
        begun = _Begun(receive)
        queue.append(begun)
        return Pending("recv", lambda: begun.after(queue))

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        self._agree("all_gather_object", ranks, ())
        return self._inner.all_gather_object(obj, ranks)

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        self._agree("barrier", ranks, ())
        self._inner.barrier(ranks)

    def group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.group`."""
        return self._inner.group(ranks)

    def build_group(self, ranks: Ranks, **options: Any) -> Any:
        """See :meth:`Transport.build_group`."""
        return self._inner.build_group(ranks, **options)

    def known_group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.known_group`."""
        return self._inner.known_group(ranks)

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`."""
        self._inner.adopt(group)

    def drop(self, group: Any) -> None:
        """See :meth:`Transport.drop`."""
        self._inner.drop(group)

    def close(self) -> None:
        """The world is the launcher's, and serves others after this rank."""

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`."""
        return self._inner.ranks_of(group)

    def _facts(self, x: Any) -> tuple[tuple[str, Any], ...]:
        return (("shape", self._ops.shape(x)), ("dtype", self._ops.dtype(x)))

    def _shapes(self, chunks: Sequence[Any]) -> tuple[Shape, ...]:
        return tuple(self._ops.shape(chunk) for chunk in chunks)

    def _agree(
        self,
        operation: str,
        ranks: Ranks,
        facts: tuple[tuple[str, Any], ...],
        sends: tuple[Shape, ...] | None = None,
        expects: tuple[Shape, ...] | None = None,
    ) -> None:
        """Return once every member is about to do the same."""
        if not self._catching_up:
            self._catch_up(None)
        check_ranks(ranks, self.rank, self.world_size)
        if len(ranks) > 1:
            nothing = [None] * len(ranks)
            self._endpoint.exchange(Call(operation, ranks, facts, nothing, call_site(), sends, expects))


class _Begun:
    """A call that runs later, once; its result or error is kept for whoever waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._value: Any = None
        self._error: CollectiveMismatchError | None = None

    def run(self) -> None:
        """Run, unless it has."""
        call, self._call = self._call, None
        if call is not None:
            try:
                self._value = call()
            except CollectiveMismatchError as error:
                self._error = error

    def after(self, queue: deque[_Begun]) -> Any:
        """Run whatever is before it in ``queue``, and it; its result."""
        while self._call is not None:
            queue.popleft().run()
        if self._error is not None:
            raise self._error
        return self._value


def _tuples(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(tuple(shape) for shape in shapes)

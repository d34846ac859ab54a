"""Messages over gloo: bytes in chunks of equal size; the first chunk begins with a header that describes the message.

Gloo accepts a too short message as complete, and kills a process that receives more bytes than it requested.
Therefore messages are sent in chunks, and the receiver compares the header with the expected one. For each message the
receiver sends back, under a second tag, the number of chunks that it had room for.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError, HandleError, RankFailedError, short_dtype
from hyper_parallel.platform.torch.versions import default_store
from hyper_parallel.transport.base import WORLD, Channel
from hyper_parallel.transport.failures import lost_peer
from hyper_parallel.transport.host.torch.ops import bytes_of, from_bytes
from hyper_parallel.transport.work import Work

__all__ = ["ChunkedReceiver", "GlooMessages", "waiter"]


Wait = Callable[[], Any]


@dataclass
class _Expected:
    """A posted receive.

    Attributes:
        count: number of expected chunks.
        earlier: the receive that was posted before this one, unless that is complete.
        chunks: the received chunks, None until then; only the first one if their number differs from ``count``.
        lock: locked while a thread waits for the chunks.
    """

    count: int
    earlier: _Expected | None
    chunks: list[Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ChunkedReceiver:
    """Receives the messages of one sender under one tag.

    Args:
        receive: function that starts to receive a chunk; it returns a function that waits for the chunk and returns it.
        count: function of the first chunk of a message that returns the message's number of chunks; 0 for a message
            without header, whose sender expects no answer.
        send_room: function that starts to send the number of chunks that there was room for; it returns a function that
            waits for the send.
    """

    def __init__(
        self, receive: Callable[[], Wait], count: Callable[[Any], int], send_room: Callable[[int], Wait]
    ) -> None:
        self._receive = receive
        self._count = count
        self._send_room = send_room
        self._lock = threading.Lock()
        self._room: deque[Wait] = deque()
        self._begun = 0
        self._needed = 0
        self._answers: deque[Wait] = deque()
        self._last: _Expected | None = None

    def expect(self, count: int) -> Wait:
        """Start receiving ``count`` chunks; return a function that waits for them."""
        with self._lock:
            self._needed += count
            # The answer is sent first; the receives of the chunks have started by the time the message arrives.
            self._answers.append(self._send_room(self._begun + max(0, self._needed - len(self._room))))
            self._make_room()
            earlier = None if self._last is None or self._last.chunks is not None else self._last
            message = self._last = _Expected(count, earlier)

        def take() -> list[Any]:
            self._serve(message)
            chunks, message.chunks = message.chunks, []
            return chunks or []

        return take

    def _serve(self, message: _Expected) -> None:
        """Wait for every message up to this one, in the order in which the receives were posted."""
        posted, earlier = [message], message.earlier
        while earlier is not None:
            posted.append(earlier)
            earlier = earlier.earlier
        for expected in reversed(posted):
            with expected.lock:
                if expected.chunks is None:
                    expected.chunks = self._receive_message(expected.count)
                    expected.earlier = None

    def _receive_message(self, expected: int) -> list[Any]:
        chunks = [self._next()]
        count = self._count(chunks[0])
        if count:
            with self._lock:
                wait_for_answer = self._answers.popleft()
            with suppress(RuntimeError):  # the sender may have exited
                wait_for_answer()
        if count == expected:
            chunks += [self._next() for _ in range(count - 1)]
        else:
            with suppress(RuntimeError):  # the message is rejected anyway, so its lost remainder is irrelevant
                for _ in range(count - 1):
                    self._next()
        with self._lock:
            self._needed -= expected
            self._make_room()
        return chunks

    def _next(self) -> Any:
        with self._lock:
            wait = self._room.popleft() if self._room else self._begin()
        return wait()

    def _begin(self) -> Wait:
        self._begun += 1
        return self._receive()

    def _make_room(self) -> None:
        """Start to receive the expected number of chunks."""
        while len(self._room) < self._needed:
            self._room.append(self._begin())


# A message: header (a mark, the size of the body, a label with dtype and shape) and body, in chunks of equal size.
_MARK = b"message:"
_LABEL = 64
_HEAD = len(_MARK) + 8 + _LABEL
_CHUNK = 1 << 20

# Gloo's tags: users' small tags are unchanged; this library's tags follow; the last ones are receivers' answers.
_FIRST_OWN = 1 << 29
_ANSWER = 1 << 30


class GlooMessages:
    """The messages that one rank sends and receives, in the world's group.

    Args:
        naming: function of a text and ranks that returns a context; inside it, gloo's error of a lost peer names the
            ranks.
    """

    def __init__(self, naming: Callable[[str, tuple[int, ...]], AbstractContextManager[None]] | None = None) -> None:
        self._naming = naming or (lambda _, __: nullcontext())
        self._tags: dict[tuple[int, Channel], int] = {}
        self._receivers: dict[tuple[int, int], ChunkedReceiver] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._unfinished: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Leave the world: from now on waiting for a message raises."""
        self._closed = True

    def send(self, x: torch.Tensor, dst: int, tag: int, channel: Channel) -> Work:
        """See :meth:`Transport.send`; for an empty tensor only the header is sent."""
        own = self._tag(tag, channel)
        carried = torch.cat([_head(x), bytes_of(x)]) if x.numel() else _head(x)
        room = torch.zeros(1, dtype=torch.int64)
        connected = functools.partial(self._connected, _description("send", x, f"to rank {dst}", tag, channel), dst)
        with self._lock, connected():
            answer = waiter(dist.irecv(room, dst, tag=own + _ANSWER))
            works = [waiter(dist.isend(chunk, dst, tag=own)) for chunk in carried.split(_CHUNK)]
            sent = self._sent[dst, own] = self._sent.get((dst, own), 0) + len(works)
            self._unfinished[id(works)] = (carried, room, answer, works)  # gloo drops unreferenced work

        def finish() -> None:
            with connected():
                answer(room)
                if int(room) < sent:
                    return  # chunks without room stay in flight until the receiver waits and discards them
                for work in works:
                    work(carried)
            del self._unfinished[id(works)]

        return Work("send", finish)

    def recv(self, like: torch.Tensor, src: int, tag: int, channel: Channel) -> Work:
        """See :meth:`Transport.recv`."""
        own = self._tag(tag, channel)
        calls = functools.partial(_receive_chunk, src, own), _count, functools.partial(_send_room, src, own + _ANSWER)
        receiver = self._receivers.setdefault((src, own), ChunkedReceiver(*calls))
        expected, size = _head(like), like.numel() * like.element_size()
        connected = functools.partial(
            self._connected, _description("recv", like, f"from rank {src}", tag, channel), src
        )  # fmt: skip
        with connected():
            arrived = receiver.expect(_chunk_count(size))

        def finish() -> torch.Tensor:
            with connected():
                chunks = arrived()
            _check_head(chunks[0][:_HEAD], expected, src)
            return from_bytes(_body(chunks, size), size, like.dtype, tuple(like.shape))

        return Work("recv", finish)

    @contextmanager
    def _connected(self, message: str, peer: int) -> Iterator[None]:
        """Raise an error that names the lost message if gloo reports a lost connection."""
        if self._closed:
            msg = f"{message} was not waited for before this rank left the world; wait, then call destroy_process_group"
            raise HandleError(msg)
        try:
            with self._naming(message, (dist.get_rank(), peer)):
                yield
        except RuntimeError as error:
            if isinstance(error, RankFailedError) or not lost_peer(error):
                raise
            msg = f"{message} is lost; that rank ended or died before, its output says why: {error}"
            raise RankFailedError(msg) from error

    def _tag(self, tag: int, channel: Channel) -> int:
        """Return gloo's tag for messages of this tag and channel: a small tag of the world itself, otherwise a new tag.

        New tags are assigned in the world's store, so that all members use the same and none is used twice.
        """
        if channel == WORLD and tag < _FIRST_OWN:
            return tag
        key = (tag, channel)
        if key not in self._tags:
            store = default_store()
            unused = _FIRST_OWN + store.add("hyper_parallel/tags", 1)
            self._tags[key] = int(store.compare_set(f"hyper_parallel/tags/{tag}/{channel!r}", "", str(unused)))
        return self._tags[key]


def waiter(work: Any) -> Callable[[Any], None]:
    """Return a function that waits for the engine's ``work`` (or None); its argument stays alive until then."""

    def wait(alive: Any) -> None:
        del alive
        if work is not None:
            work.wait()

    return wait


def _description(what: str, x: torch.Tensor, peer: str, tag: int, channel: Channel) -> str:
    where = f"tag {tag}, {channel}" if channel != WORLD else f"tag {tag}"
    return f"{what}: {short_dtype(x.dtype)}{list(x.shape)} {peer} ({where})"


def _head(x: torch.Tensor) -> torch.Tensor:
    """Return the header of a message: a mark, the size of the body, and a label of fixed size with dtype and shape.

    The end of a label that is too long is replaced by a digest.
    """
    text = f"{short_dtype(x.dtype)}{list(x.shape)}".encode()
    if len(text) > _LABEL:
        text = text[: _LABEL - 8] + zlib.crc32(text).to_bytes(4, "big").hex().encode()
    size = (x.numel() * x.element_size()).to_bytes(8, "little")
    return torch.frombuffer(bytearray(_MARK + size + text.ljust(_LABEL)), dtype=torch.uint8)


def _count(first: torch.Tensor) -> int:
    """Return the number of chunks of the message with this header; 0 if it was not sent by this class."""
    head = first[: _HEAD - _LABEL].numpy().tobytes()
    return _chunk_count(int.from_bytes(head[len(_MARK) :], "little")) if head.startswith(_MARK) else 0


def _chunk_count(body: int) -> int:
    """Return the number of chunks of a message with a body of this many bytes."""
    return -(-(_HEAD + body) // _CHUNK)


def _receive_chunk(src: int, tag: int) -> Callable[[], torch.Tensor]:
    """Start to receive a chunk; return a function that waits and returns a buffer that begins with the chunk."""
    room = torch.empty(_CHUNK, dtype=torch.uint8)
    room[: len(_MARK)] = 0  # a message shorter than a header must not be read as an old header in this buffer
    work = waiter(dist.irecv(room, src, tag=tag))

    def wait() -> torch.Tensor:
        work(room)
        return room

    return wait


def _send_room(src: int, tag: int, count: int) -> Callable[[], None]:
    """Start to send the number of chunks that had room to the message's sender; return a function that waits."""
    room = torch.tensor([count])
    work = waiter(dist.isend(room, src, tag=tag))
    return lambda: work(room)


def _body(chunks: list[torch.Tensor], size: int) -> torch.Tensor:
    """Return the body after the header, with its own memory."""
    left = _HEAD + size - (len(chunks) - 1) * _CHUNK
    parts = [*chunks[:-1], chunks[-1][:left]]
    return torch.cat([parts[0][_HEAD:], *parts[1:]])


def _check_head(received: torch.Tensor, expected: torch.Tensor, src: int) -> None:
    if not torch.equal(received, expected):
        sent, awaited = (_label(head.numpy().tobytes()) for head in (received, expected))
        msg = f"recv: rank {src} sent {sent}, {awaited} was expected"
        raise CollectiveMismatchError(msg)


def _label(head: bytes) -> str:
    label = head[-_LABEL:].decode(errors="replace").rstrip()
    return label if head.startswith(_MARK) else "a message not sent by isend, send_object_list or p2p_exchange"

"""Messages over gloo: bytes in pieces of one size, of which the first tells what they are.

Gloo takes a message that is too short for whole, and ends the process that is sent more than it asked for. So every
message begins with a head that the receiver compares with what it expects, and travels in pieces (see ``inbox``). For
each message the receiver sends back, under a tag beside, for how many pieces there has been room.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.errors import CollectiveMismatchError, HandleError, RankFailedError, short_dtype
from hyper_parallel.transport.base import WORLD, Channel, Shape
from hyper_parallel.transport.chunked_receive import ChunkedReceiver
from hyper_parallel.transport.failures import lost_peer
from hyper_parallel.transport.work import Work

__all__ = ["GlooMessages", "bytes_of", "from_bytes", "started"]

# A message: the head (a mark, the bytes of the body, what it is), and the body; in pieces of one size.
_MARK = b"message:"
_LABEL = 64
_HEAD = len(_MARK) + 8 + _LABEL
_PIECE = 1 << 20

# Gloo's tags: small ones are left as they were given; then follow our own, and then those of answers to either.
_FIRST_OWN = 1 << 29
_BESIDE = 1 << 30


class GlooMessages:
    """What one rank sends to others and receives from them, in the world's own group."""

    def __init__(self) -> None:
        self._tags: dict[tuple[int, Channel], int] = {}
        self._inboxes: dict[tuple[int, int], ChunkedReceiver] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._unfinished: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Leave the world: whoever waits for a message from now on is told so."""
        self._closed = True

    def send(self, x: torch.Tensor, dst: int, tag: int, channel: Channel) -> Work:
        """See :meth:`Transport.send`; of an empty tensor the head alone travels."""
        own = self._tag(tag, channel)
        carried = torch.cat([_head(x), bytes_of(x)]) if x.numel() else _head(x)
        room = torch.zeros(1, dtype=torch.int64)
        connected = functools.partial(self._connected, _words("send", x, f"to rank {dst}", tag, channel))
        with self._lock, connected():
            told = started(dist.irecv(room, dst, tag=own + _BESIDE))
            works = [started(dist.isend(piece, dst, tag=own)) for piece in carried.split(_PIECE)]
            sent = self._sent[dst, own] = self._sent.get((dst, own), 0) + len(works)
            self._unfinished[id(works)] = (carried, room, told, works)  # gloo forgets what nobody holds any more

        def finish() -> None:
            with connected():
                told(room)
                if int(room) < sent:
                    return  # what does not fit is on its way until the receiver waits, and refuses it
                for work in works:
                    work(carried)
            del self._unfinished[id(works)]

        return Work("send", finish)

    def recv(self, like: torch.Tensor, src: int, tag: int, channel: Channel) -> Work:
        """See :meth:`Transport.recv`."""
        own = self._tag(tag, channel)
        calls = functools.partial(_receive_piece, src, own), _count, functools.partial(_tell_room, src, own + _BESIDE)
        inbox = self._inboxes.setdefault((src, own), ChunkedReceiver(*calls))
        wanted, size = _head(like), like.numel() * like.element_size()
        connected = functools.partial(self._connected, _words("recv", like, f"from rank {src}", tag, channel))
        with connected():
            arrived = inbox.expect(_pieces(size))

        def finish() -> torch.Tensor:
            with connected():
                pieces = arrived()
            _check_head(pieces[0][:_HEAD], wanted, src)
            return from_bytes(_body(pieces, size), size, like.dtype, tuple(like.shape))

        return Work("recv", finish)

    @contextmanager
    def _connected(self, message: str) -> Iterator[None]:
        """Tell which message is lost where gloo says that a connection is gone."""
        if self._closed:
            msg = f"{message} was not waited for before this rank left the world; wait, then call destroy_process_group"
            raise HandleError(msg)
        try:
            yield
        except RuntimeError as error:
            if not lost_peer(error):
                raise
            msg = f"{message} is lost; that rank ended or died before, its output says why: {error}"
            raise RankFailedError(msg) from error

    def _tag(self, tag: int, channel: Channel) -> int:
        """Gloo's tag for messages of this tag and channel: of small tags outside of groups the same, else a new one.

        It is agreed upon in the world's store, so that all members have the same and none has two meanings.
        """
        if channel == WORLD and tag < _FIRST_OWN:
            return tag
        key = (tag, channel)
        if key not in self._tags:
            store = distributed_c10d._get_default_store()  # noqa: SLF001 - no public spelling
            free = _FIRST_OWN + store.add("hyper_parallel/tags", 1)
            self._tags[key] = int(store.compare_set(f"hyper_parallel/tags/{tag}/{channel!r}", "", str(free)))
        return self._tags[key]


def started(work: Any) -> Callable[[Any], None]:
    """Waits for the engine's ``work`` (None has nothing to wait for), holding what it reads until then."""

    def wait(held: Any) -> None:
        del held
        if work is not None:
            work.wait()

    return wait


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as flat bytes; shares memory where ``x`` is contiguous."""
    plain = x.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(carried: torch.Tensor, size: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """The first ``size`` bytes as a tensor; of its own memory where ``carried`` is longer."""
    exact = carried if carried.numel() == size else carried[:size].clone()
    return exact.view(dtype).reshape(tuple(shape))


def _words(what: str, x: torch.Tensor, peer: str, tag: int, channel: Channel) -> str:
    where = f"tag {tag}, {channel}" if channel != WORLD else f"tag {tag}"
    return f"{what}: {short_dtype(x.dtype)}{list(x.shape)} {peer} ({where})"


def _head(x: torch.Tensor) -> torch.Tensor:
    """What a message over gloo begins with: gloo takes a message that is too short for whole, and the rest is garbage.

    Dtype and shape in bytes of a fixed number; of very many dims the rest is told by a digest.
    """
    text = f"{short_dtype(x.dtype)}{list(x.shape)}".encode()
    if len(text) > _LABEL:
        text = text[: _LABEL - 8] + zlib.crc32(text).to_bytes(4, "big").hex().encode()
    size = (x.numel() * x.element_size()).to_bytes(8, "little")
    return torch.frombuffer(bytearray(_MARK + size + text.ljust(_LABEL)), dtype=torch.uint8)


def _count(first: torch.Tensor) -> int:
    """Of how many pieces the message is that begins with this head; 0 if the platform has not sent it."""
    head = first[: _HEAD - _LABEL].numpy().tobytes()
    return _pieces(int.from_bytes(head[len(_MARK) :], "little")) if head.startswith(_MARK) else 0


def _pieces(body: int) -> int:
    """Of how many pieces a message is whose body has so many bytes."""
    return -(-(_HEAD + body) // _PIECE)


def _receive_piece(src: int, tag: int) -> Callable[[], torch.Tensor]:
    """Begin to receive a piece; what waits for it, and gives room of which it may fill the beginning."""
    room = torch.empty(_PIECE, dtype=torch.uint8)
    room[: len(_MARK)] = 0  # a message that is shorter than a head must not find another one's here
    work = started(dist.irecv(room, src, tag=tag))

    def wait() -> torch.Tensor:
        work(room)
        return room

    return wait


def _tell_room(src: int, tag: int, made: int) -> Callable[[], None]:
    """Begin to tell a sender for how many pieces there has been room; what waits until it is told."""
    room = torch.tensor([made])
    work = started(dist.isend(room, src, tag=tag))
    return lambda: work(room)


def _body(pieces: list[torch.Tensor], size: int) -> torch.Tensor:
    """What follows the head, in memory of its own."""
    left = _HEAD + size - (len(pieces) - 1) * _PIECE
    parts = [*pieces[:-1], pieces[-1][:left]]
    return torch.cat([parts[0][_HEAD:], *parts[1:]])


def _check_head(found: torch.Tensor, wanted: torch.Tensor, src: int) -> None:
    if torch.equal(found, wanted):
        return
    sent, expected = (_told(one.numpy().tobytes()) for one in (found, wanted))
    msg = f"recv: rank {src} sent {sent}, {expected} was expected"
    raise CollectiveMismatchError(msg)


def _told(head: bytes) -> str:
    label = head[-_LABEL:].decode(errors="replace").rstrip()
    return label if head.startswith(_MARK) else "a message by other means than isend, send_object_list or p2p_exchange"

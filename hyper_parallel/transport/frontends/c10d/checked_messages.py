"""``torch.distributed``'s own messages on checked ranks: both sides are compared, and endless waits raise an error.

``isend`` and ``irecv`` are replaced; send, recv, their forms for objects, and ``batch_isend_irecv`` call those. Over
gloo the coordinator also transfers the values. Gloo itself ends a process that receives more than its buffer holds,
delivers the rest with the next receive, and does not report whether a send is complete. As over gloo, a send is
complete when its receive is posted, so two ranks that both send first deadlock; this is reported at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import WORLD, Channel
from hyper_parallel.transport.checks.fingerprint import ANY_SOURCE, MessageFingerprint, call_site
from hyper_parallel.transport.checks.torch_distributed import LIBRARY_FILES, name_of, replace_function
from hyper_parallel.transport.frontends.c10d.pending_receives import watch_receive
from hyper_parallel.transport.frontends.c10d.simulated_work import SimulatedWork, require_unwritten
from hyper_parallel.transport.host.torch.ops import bytes_of

__all__ = ["guard_messages"]

_TRANSPORT = "hyper_parallel.transport."  # messages of this library's transports are compared already


class _Messages(Protocol):
    """Compares the two sides of messages: see :class:`GuardedTransport`."""

    def post(self, message: MessageFingerprint, payload: Any = None, *, sending: bool) -> int: ...

    def settle(self, ticket: int) -> tuple[int, Any]: ...

    def is_settled(self, ticket: int) -> bool: ...


def guard_messages(messages: _Messages) -> None:
    """Compare every message that this process sends or receives by ``torch.distributed`` from now on.

    Args:
        messages: connection to the coordinator.
    """
    for name in ("isend", "irecv"):
        replace_function(name, functools.partial(_carry, messages, sending=name == "isend"), (_TRANSPORT,))


def _carry(messages: _Messages, plain: Callable[..., Any], bound: inspect.BoundArguments, *, sending: bool) -> Any:
    """Route a message through the coordinator if the coordinator can transfer it, else through PyTorch."""
    peer_name = "dst" if sending else "src"
    x, tag, group = bound.arguments["tensor"], bound.arguments["tag"], bound.arguments["group"]
    group = dist.group.WORLD if group is None else group
    peer = _peer(group, bound.arguments[peer_name], bound.arguments[f"group_{peer_name}"], sending=sending)
    if peer is None or not _carried(x, tag, group):
        return plain(*bound.args, **bound.kwargs)
    message = _message(x, peer, tag, group, sending=sending)
    return _send(messages, x, message) if sending else _receive(messages, x, message, group)


def _peer(group: Any, rank: int | None, inside: int | None, *, sending: bool) -> int | None:
    """Global rank of the other side; None if PyTorch rejects or ignores the call, or if the other side is this rank."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or (rank is not None and inside is not None):
        return None
    if rank is None and inside is None:
        return None if sending else ANY_SOURCE
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        return None
    numbered = dict(enumerate(ranks)) if rank is None else {number: number for number in ranks}
    number = inside if rank is None else rank
    if number not in numbered:  # PyTorch 2.13 ends the process if the group is the world's
        of_group = "group rank" if rank is None else "rank"
        what = "isend" if sending else "irecv"
        msg = f"{what} on rank {dist.get_rank()} names {of_group} {number}; the ranks of its group are {ranks}"
        raise CollectiveMismatchError(msg)
    return numbered[number] if numbered[number] != dist.get_rank() else None


def _carried(x: object, tag: int, group: Any) -> bool:
    """Whether the coordinator transfers the message: true over gloo, unless gloo would reject the message."""
    dense = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and x.is_contiguous()  # type: ignore[attr-defined]
    return bool(dense and tag >= 0 and group._get_backend(x.device).name() == "gloo")  # type: ignore[attr-defined]  # noqa: SLF001 - no public spelling


def _message(x: torch.Tensor, peer: int, tag: int, group: Any, *, sending: bool) -> MessageFingerprint:
    rank, name = dist.get_rank(), name_of(group)
    channel = Channel(ranks=tuple(dist.get_process_group_ranks(group)), build=f"named {name!r}") if name else WORLD
    facts = (("shape", tuple(x.shape)), ("dtype", str(x.dtype)))
    source, destination = (rank, peer) if sending else (peer, rank)
    return MessageFingerprint(source, destination, tag, facts, call_site(*LIBRARY_FILES), channel, counted=True)


def _send(messages: _Messages, x: torch.Tensor, message: MessageFingerprint) -> SimulatedWork:
    sent = _to_bytes(x)
    ticket = messages.post(message, sent, sending=True)

    def finish() -> list[torch.Tensor]:
        require_unwritten(x, sent, message.site)
        messages.settle(ticket)
        return [x]

    return SimulatedWork(finish, lambda: messages.is_settled(ticket))


def _receive(messages: _Messages, x: torch.Tensor, message: MessageFingerprint, group: Any) -> SimulatedWork:
    ticket = messages.post(message, sending=False)
    source, end = message.source, watch_receive(x, message.site)

    def finish() -> list[torch.Tensor]:
        nonlocal source
        end()
        source, carried = messages.settle(ticket)
        x.data.copy_(_from_bytes(carried, x))
        return [x]

    return SimulatedWork(finish, lambda: messages.is_settled(ticket), lambda: dist.get_group_rank(group, source))


def _to_bytes(x: torch.Tensor) -> bytes:
    return bytes_of(x.cpu()).numpy().tobytes()


def _from_bytes(carried: bytes, like: torch.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(carried), dtype=torch.uint8) if carried else torch.empty(0, dtype=torch.uint8)
    return flat.view(like.dtype).reshape(like.shape)

"""The collectives of MindSpore's world on host arrays: fingerprints, payloads, and results.

The functions are named after MindSpore's primitives. A primitive and the functions of ``comm_func`` and
``mint.distributed`` for the same collective have the same fingerprint, because they match each other on devices too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspore
import numpy as np

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import WORLD, Channel, Shape, check_reduction
from hyper_parallel.transport.checks.fingerprint import (
    CollectiveFingerprint,
    Facts,
    MessageFingerprint,
    Site,
    call_site,
)
from hyper_parallel.transport.frontends.mindspore_comm.world import Group, World
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.simulated.endpoint import Contribution
from hyper_parallel.transport.work import Work

__all__ = [
    "Array",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

Array = np.ndarray[Any, Any]

_OPS = NumpyOps()
# Stack frames between a user's line and a collective: MindSpore, this library's patches, decorators, generated code.
_BENEATH = (
    str(Path(mindspore.__file__).resolve().parent) + os.sep,
    str(Path(__file__).resolve().parents[3] / "platform" / "mindspore") + os.sep,
    "<",
)


def all_reduce(world: World, group: Group, x: Array, op: str) -> Work:
    """Return the reduction of all members' ``x``, in rank order."""
    check_reduction(op, inexact=_OPS.inexact(x))
    payloads = [x] * len(group.ranks)
    return _start(world, group, "AllReduce", _reduced(x, op), payloads).then(lambda parts: _OPS.reduce(parts, op))


def all_gather(world: World, group: Group, x: Array, shapes: Sequence[Shape] | None = None) -> Work:
    """Return every member's ``x`` in a list; ``shapes`` is needed if shapes may differ."""
    facts = _tensor(x)
    if shapes is not None and len(set(shapes)) > 1:
        facts = (("dtype", _OPS.dtype(x)), ("shapes", tuple(shapes)))
    return _start(world, group, "AllGather", facts, [x] * len(group.ranks)).then(_copies)


def reduce_scatter(world: World, group: Group, chunks: Sequence[Array], op: str) -> Work:
    """Return the reduction of the members' chunks for this rank."""
    check_reduction(op, inexact=_OPS.inexact(chunks[0]))
    shapes = tuple(_OPS.shape(chunk) for chunk in chunks)
    facts: Facts = (("dtype", _OPS.dtype(chunks[0])), ("shapes", shapes), ("reduction", op))
    return _start(world, group, "ReduceScatter", facts, chunks).then(lambda parts: _OPS.reduce(parts, op))


def broadcast(world: World, group: Group, x: Array, root: int) -> Work:
    """Return the root's ``x``; on other members only shape and dtype are used. ``root`` is a global rank."""
    payload = x if root == world.rank else None
    facts = (*_tensor(x), ("root", root))
    position = group.ranks.index(root)
    work = _start(world, group, "Broadcast", facts, [payload] * len(group.ranks))
    return work.then(lambda parts: _OPS.copy(parts[position]))


def reduce(world: World, group: Group, x: Array, op: str, root: int) -> Work:
    """Return the reduction on the root, None on other members."""
    check_reduction(op, inexact=_OPS.inexact(x))
    facts = (*_reduced(x, op), ("root", root))
    work = _start(world, group, "Reduce", facts, _for_root(group, x, root))
    return work.then(lambda parts: _OPS.reduce(parts, op) if world.rank == root else None)


def gather(world: World, group: Group, x: Array, root: int) -> Work:
    """Return every member's ``x`` in a list on the root, None on other members."""
    work = _start(world, group, "CollectiveGather", (*_tensor(x), ("root", root)), _for_root(group, x, root))
    return work.then(lambda parts: _copies(parts) if world.rank == root else None)


def scatter(world: World, group: Group, chunks: Sequence[Array], like: Array, root: int) -> Work:
    """Return this rank's chunk from the root; each chunk has the shape and dtype of ``like``."""
    payloads = chunks if world.rank == root else [None] * len(group.ranks)
    position = group.ranks.index(root)
    work = _start(world, group, "CollectiveScatter", (*_tensor(like), ("root", root)), payloads)
    return work.then(lambda parts: _OPS.copy(parts[position]))


def all_to_all(world: World, group: Group, chunks: Sequence[Array], counts: Sequence[int]) -> Work:
    """Return each member's chunk for this rank in a list; chunks are flat, with expected sizes ``counts``."""
    sends = tuple((chunk.size,) for chunk in chunks)
    expects = tuple((count,) for count in counts)
    for what, sizes in (("sends", sends), ("expects", expects)):
        if len(sizes) != len(group.ranks):
            msg = f"AlltoAll in {group} {what} {len(sizes)} chunks; expected one per member, {len(group.ranks)}"
            raise CollectiveMismatchError(msg)
    facts: Facts = (("dtype", _OPS.dtype(chunks[0])),)
    return _start(world, group, "AlltoAll", facts, chunks, sends, expects).then(_copies)


def barrier(world: World, group: Group) -> Work:
    """Wait until every member has called it."""
    return _start(world, group, "Barrier", (), [None] * len(group.ranks)).then(lambda _: None)


def send(world: World, group: Group, x: Array, destination: int, tag: int) -> None:
    """Send a copy of ``x`` to a global rank without waiting; dtype and number of elements must match the receive's."""
    flat = _OPS.copy(x).reshape(-1)
    world.endpoint.send(_message(world.rank, destination, tag, _tensor(flat), group), flat)


def recv(world: World, group: Group, like: Array, source: int, tag: int) -> Work:
    """Post a receive with the shape and dtype of ``like``; receives of one mailbox are served in order."""
    posted = _message(source, world.rank, tag, _tensor(like.reshape(-1)), group)
    world.posted.setdefault(posted.key, deque()).append(posted)
    return Work("recv", lambda: _receive(world, posted).reshape(like.shape))


def _receive(world: World, posted: MessageFingerprint) -> Array:
    queue = world.posted[posted.key]
    while id(posted) not in world.arrived:
        first = queue.popleft()
        try:
            world.arrived[id(first)] = (world.endpoint.receive(first), None)
        except CollectiveMismatchError as error:
            world.arrived[id(first)] = (None, error)
    payload, problem = world.arrived.pop(id(posted))
    if problem is not None:
        raise problem
    arrived: Array = payload
    return arrived


def _start(
    world: World,
    group: Group,
    operation: str,
    facts: Facts,
    payloads: Sequence[Any],
    sends: tuple[Shape, ...] | None = None,
    expects: tuple[Shape, ...] | None = None,
) -> Work:
    """Start a collective; the handle's result is each member's payload for this rank, in rank order."""
    if len(group.ranks) == 1:
        return Work(operation, _constant([_copy(payload) for payload in payloads]))
    fingerprint = CollectiveFingerprint(operation, group.ranks, facts, _site(), sends, expects, group.name)
    ticket = next(world.tickets)
    world.endpoint.start(Contribution(fingerprint, list(payloads), ticket))
    return Work(operation, lambda: world.endpoint.wait(ticket))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _copy(payload: Any) -> Any:
    return None if payload is None else _OPS.copy(payload)


def _copies(parts: Sequence[Array]) -> list[Array]:
    return [_OPS.copy(part) for part in parts]


def _for_root(group: Group, x: Array, root: int) -> list[Any]:
    return [x if rank == root else None for rank in group.ranks]


def _tensor(x: Array) -> Facts:
    return (("shape", _OPS.shape(x)), ("dtype", _OPS.dtype(x)))


def _reduced(x: Array, op: str) -> Facts:
    return (*_tensor(x), ("reduction", op))


def _message(source: int, destination: int, tag: int, facts: Facts, group: Group) -> MessageFingerprint:
    channel = Channel(ranks=group.ranks, build=group.name) if group.name else WORLD
    return MessageFingerprint(source, destination, tag, facts, _site(), channel)


def _site() -> Site:
    return call_site(*_BENEATH)

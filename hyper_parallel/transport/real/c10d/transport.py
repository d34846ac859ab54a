"""Collectives over ``torch.distributed``, for every dtype, stride and size on every backend.

Collectives without reduction transfer bytes. An accelerator's backend reduces the dtypes that it supports. Otherwise
(gloo, bool, complex, float64 on HCCL) tensors are gathered and reduced in the order of ``ranks``, as in the simulation.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError, RendezvousError, UnsupportedOnBackend
from hyper_parallel.transport.base import WORLD, Channel, Parts, Ranks, Shape, by_rank, check_ranks, check_reduction
from hyper_parallel.transport.frontends.c10d.engine_rules import rules_of
from hyper_parallel.transport.host.torch.ops import bytes_of, from_bytes, materialized, reduce_in_order
from hyper_parallel.transport.real.c10d.gloo import GlooMessages, waiter
from hyper_parallel.transport.real.c10d.lost_peers import LostPeers
from hyper_parallel.transport.real.c10d.missing_devices import missing_device
from hyper_parallel.transport.real.c10d.row_collectives import OPS, OPTIONS, C10dRows, is_native
from hyper_parallel.transport.real.c10d.staged_group import register_engine
from hyper_parallel.transport.work import Work

__all__ = ["C10dTransport", "join_world", "start_gloo", "start_world"]

_ENGINES = {"cuda": "nccl", "npu": "hccl"}  # backends by device type
# Up to this many elements, one all-gather is faster than a reduce-scatter followed by an all-gather.
_SMALL = 16384


class C10dTransport(C10dRows):
    """Collectives over an initialised ``torch.distributed`` world (gloo, NCCL, HCCL).

    ``torch.distributed`` orders the members of a group by global rank; results are put into the order of ``ranks``.
    """

    def __init__(self, *, watched: bool = False) -> None:
        """Use the world that this process has joined.

        Args:
            watched: whether a coordinator in another process monitors the ranks.
        """
        super().__init__()
        self._checked: set[Ranks] = set()
        self.survives_mismatch = self.backend == "gloo"
        self._lost = LostPeers(self.rank) if self.backend == "gloo" and not watched else None
        self._messages = GlooMessages(self._naming)

    def _naming(self, what: str, ranks: Ranks) -> AbstractContextManager[None]:
        """Context in which gloo's error of a lost peer is replaced by one with the ranks that do not answer."""
        return nullcontext() if self._lost is None else self._lost.named(what, ranks)

    def _finish(self, what: str, ranks: Ranks, work: Any) -> None:
        if self._lost is None:
            work.wait()
        else:
            with self._naming(f"{what} of ranks {ranks}", ranks):
                work.wait()

    def _waiter(self, what: str, ranks: Ranks, work: Any) -> Callable[[Any], None]:
        """See :func:`waiter`; for a collective of ``ranks``."""
        wait = waiter(work)

        def named(alive: Any) -> None:
            with self._naming(f"{what} of ranks {ranks}", ranks):
                wait(alive)

        return named

    def built(self, ranks: Ranks, build: Callable[[], Any]) -> Any:
        """Return the group that ``build`` creates.

        Args:
            ranks: the members.
            build: called in a separate thread, unless a coordinator monitors the ranks.

        Raises:
            RankFailedError: members did not join, or the store cannot be reached; the error lists the ranks that
                answer.
        """
        return build() if self._lost is None else self._lost.built(ranks, build)

    def _limits(self) -> dict[str, Any]:
        """Return the world's time limit, because PyTorch's default for a group is always half an hour."""
        return {} if self._lost is None else self._lost.limits()

    def claim(self, proposal: str, ranks: Ranks) -> list[str]:
        """See :meth:`Transport.claim`; a store that does not answer is an error at the world's time limit."""
        claim = super().claim
        if self._lost is None:
            return claim(proposal, ranks)
        return self._lost.answered(f"start of a collective of ranks {ranks}", ranks, lambda: claim(proposal, ranks))

    def all_reduce(self, x: torch.Tensor, op: str, ranks: Ranks) -> torch.Tensor:
        """See :meth:`Transport.all_reduce`."""
        if ranks not in self._checked:
            check_ranks(ranks, self.rank, self.world_size)
            self._checked.add(ranks)
        if len(ranks) > 1 and x.numel() and is_native(self.backend, x.dtype, op):
            own = x.detach() if x.requires_grad else x
            total = own.clone(memory_format=torch.contiguous_format)
            # A method of the group: the module-level function takes twice as long, because it logs.
            self.group(ranks).allreduce([total], OPTIONS[op]).wait()
            return total.div_(len(ranks)) if op == "avg" else total
        check_reduction(op, inexact=x.is_floating_point() or x.is_complex())
        if len(ranks) == 1 or not x.numel():
            return reduce_in_order([x], op)
        # Vectorized code rounds complex products depending on an element's position, so they are not split.
        if x.numel() <= _SMALL or x.is_complex():
            return reduce_in_order(self.all_gather(x, ranks, [tuple(x.shape)] * len(ranks)), op)
        if x.numel() % len(ranks) == 0:
            shapes = ((x.numel() // len(ranks),),) * len(ranks)
            total = self.reduce_scatter_rows(x.detach().reshape(len(ranks), -1).contiguous(), op, ranks, shapes)
            return self.all_gather_rows(total, ranks, shapes).reshape(x.shape)
        chunks = x.detach().reshape(-1).tensor_split(len(ranks))
        own = self.reduce_scatter(chunks, op, ranks)
        return torch.cat(self.all_gather(own, ranks, [tuple(chunk.shape) for chunk in chunks])).reshape(x.shape)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """See :meth:`Transport.send`; an empty tensor needs no message, except on gloo, which sends its header."""
        if self._is_chunked(dst):
            self._send(x, dst, tag, channel).wait()
        elif x.numel():
            dist.send(bytes_of(x), dst, tag=self._engine_tag(tag))

    def recv(self, like: torch.Tensor, src: int, tag: int = 0, channel: Channel = WORLD) -> torch.Tensor:
        """See :meth:`Transport.recv`."""
        return self._recv(like, src, tag, channel).wait()

    def _all_reduce(self, x: torch.Tensor, op: str, ranks: Ranks) -> Work:
        check_ranks(ranks, self.rank, self.world_size)
        check_reduction(op, inexact=x.is_floating_point() or x.is_complex())
        if len(ranks) == 1 or not x.numel() or not is_native(self.backend, x.dtype, op):
            # One all-gather, whatever the size: the two steps of all_reduce() cannot be started as one work.
            return self._all_gather(x, ranks, [tuple(x.shape)] * len(ranks)).then(
                lambda parts: reduce_in_order(parts, op)
            )
        total = x.detach().clone(memory_format=torch.contiguous_format)
        work = self.group(ranks).allreduce([total], OPTIONS[op])

        def finish() -> torch.Tensor:
            work.wait()
            return total.div_(len(ranks)) if op == "avg" else total

        return Work("all_reduce", finish, total)

    def _all_gather(self, x: torch.Tensor, ranks: Ranks, shapes: Sequence[Shape]) -> Work:
        _check_own("all_gather", x, shapes, check_ranks(ranks, self.rank, self.world_size), len(ranks))
        sizes = [math.prod(shape) * x.element_size() for shape in shapes]
        largest = max(sizes)
        if len(ranks) == 1 or not largest:
            own = [x.detach().clone(memory_format=torch.contiguous_format) if _own(shape, x) else x.new_empty(shape)
                   for shape in shapes]  # fmt: skip
            return Work("all_gather", lambda: own)
        ours = bytes_of(x)
        if ours.numel() < largest:
            ours = torch.cat([ours, ours.new_zeros(largest - ours.numel())])
        parts = [torch.empty_like(ours) for _ in ranks]
        work = self._waiter(
            "all_gather", ranks,
            dist.all_gather([parts[place] for place in by_rank(ranks)], ours, group=self.group(ranks), async_op=True),
        )  # fmt: skip

        def finish() -> list[torch.Tensor]:
            work(ours)
            return [from_bytes(part, size, x.dtype, shape)
                    for part, size, shape in zip(parts, sizes, shapes, strict=True)]  # fmt: skip

        return Work("all_gather", finish)

    def _reduce_scatter(self, chunks: Sequence[torch.Tensor], op: str, ranks: Ranks) -> Work:
        position = check_ranks(ranks, self.rank, self.world_size)
        first = chunks[0]
        check_reduction(op, inexact=first.is_floating_point() or first.is_complex())
        own = tuple(chunks[position].shape)
        if len(ranks) > 1 and is_native(self.backend, first.dtype, op):
            return self._native_reduce_scatter(chunks, op, ranks, own)
        flat = torch.cat([chunk.detach().reshape(-1) for chunk in chunks])
        exchanged = self._all_to_all(
            flat, ranks, Parts.of(chunk.shape for chunk in chunks), Parts.of([own] * len(ranks))
        )
        return exchanged.then(lambda parts: reduce_in_order(parts.reshape(len(ranks), *own).unbind(), op))

    def _all_to_all(self, x: torch.Tensor, ranks: Ranks, sends: Parts, expects: Parts) -> Work:
        order, group = self._order(ranks), self.group(ranks)
        _check_parts(x, sends, expects, ranks.index(self.rank), len(ranks))
        flat = materialized(x.detach()).reshape(-1)
        if len(ranks) == 1:
            kept = flat.clone()
            return Work("all_to_all", lambda: kept)
        if order is not None:
            flat = _reordered(flat, sends.sizes, order[0])
        outgoing, incoming = (
            list(parts.sizes) if order is None else list(parts.of_members(order[0])) for parts in (sends, expects)
        )
        arrived = flat.new_empty((expects.total,))
        sent, received, width = flat, arrived, 1
        if x.dtype not in self._carried:
            sent, received, width = bytes_of(flat), arrived.view(torch.uint8), x.element_size()
            outgoing, incoming = ([size * width for size in sizes] for sizes in (outgoing, incoming))
        # A method of the group: the module-level function takes twice as long, because it logs.
        work = self._waiter("all_to_all", ranks, group.alltoall_base(received, sent, incoming, outgoing))

        def finish() -> torch.Tensor:
            work(sent)
            return arrived if order is None else _reordered(arrived, expects.of_members(order[0]), order[1])

        return Work("all_to_all", finish)

    def _broadcast(self, x: torch.Tensor, src: int, ranks: Ranks) -> Work:
        check_ranks(ranks, self.rank, self.world_size)
        check_ranks(ranks, src, self.world_size)
        carried = bytes_of(x).clone()
        result = from_bytes(carried, carried.numel(), x.dtype, tuple(x.shape))
        if len(ranks) == 1 or not carried.numel():
            return Work("broadcast", lambda: result)
        work = self._waiter(
            "broadcast", ranks, dist.broadcast(carried, src, group=self.group(ranks), async_op=True)
        )  # fmt: skip

        def finish() -> torch.Tensor:
            work(carried)
            return result

        return Work("broadcast", finish, result)

    def _is_chunked(self, peer: int) -> bool:
        """Whether messages to and from ``peer`` are sent in chunks, which only gloo needs."""
        return self.backend == "gloo" and peer != self.rank

    def _engine_tag(self, tag: int) -> int:
        """Return the engine's tag; NCCL and HCCL have no tags and match messages by order."""
        return 0 if self.backend in _ENGINES.values() else tag

    def _send(self, x: torch.Tensor, dst: int, tag: int = 0, channel: Channel = WORLD) -> Work:
        if self._is_chunked(dst):
            return self._messages.send(x, dst, tag, channel)
        if not x.numel():
            return Work("send", lambda: None)
        carried = bytes_of(x).clone()
        work = waiter(dist.isend(carried, dst, tag=self._engine_tag(tag)))
        return Work("send", lambda: work(carried))

    def _recv(self, like: torch.Tensor, src: int, tag: int = 0, channel: Channel = WORLD) -> Work:
        if self._is_chunked(src):
            return self._messages.recv(like, src, tag, channel)
        size = like.numel() * like.element_size()
        if not size:
            return Work("recv", lambda: torch.empty_like(like, memory_format=torch.contiguous_format))
        carried = torch.empty(size, dtype=torch.uint8, device=like.device)
        work = waiter(dist.irecv(carried, src, tag=self._engine_tag(tag)))

        def finish() -> torch.Tensor:
            work(carried)
            return from_bytes(carried, size, like.dtype, tuple(like.shape))

        return Work("recv", finish)

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        check_ranks(ranks, self.rank, self.world_size)
        gathered: list[Any] = [None] * len(ranks)
        with self._naming(f"all_gather_object of ranks {ranks}", ranks):
            dist.all_gather_object(gathered, obj, group=self.group(ranks))
        ordered = dict(zip(by_rank(ranks), gathered, strict=True))
        return [ordered[position] for position in range(len(ranks))]

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`; on accelerators it exchanges objects, as c10d may guess a wrong device."""
        if self.backend == "gloo":
            check_ranks(ranks, self.rank, self.world_size)
            with self._naming(f"barrier of ranks {ranks}", ranks):
                dist.barrier(group=self.group(ranks))
        else:
            self.all_gather_object(None, ranks)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._groups.clear()
        self._messages.close()
        dist.destroy_process_group()

    def _native_reduce_scatter(self, chunks: Sequence[torch.Tensor], op: str, ranks: Ranks, own: Shape) -> Work:
        """Run the engine's own reduce-scatter on chunks padded to the largest size."""
        largest = max(chunk.numel() for chunk in chunks)
        padded = chunks[0].new_zeros((len(chunks), largest))
        for row, place in enumerate(by_rank(ranks)):
            padded[row, : chunks[place].numel()] = chunks[place].detach().reshape(-1)
        mine = padded.new_empty(largest)
        work = waiter(
            dist.reduce_scatter(mine, list(padded.unbind()), OPS[op], group=self.group(ranks), async_op=True)
            if largest
            else None
        )

        def finish() -> torch.Tensor:
            work(padded)
            kept = mine[: math.prod(own)].clone().reshape(own)
            return kept.div_(len(ranks)) if op == "avg" else kept

        return Work("reduce_scatter", finish)


def _reordered(flat: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return the chunks of ``flat``, with ``sizes``, in a different order."""
    parts = torch.split(flat, list(sizes))
    return torch.cat([parts[index] for index in order])


def _check_parts(x: torch.Tensor, sends: Parts, expects: Parts, position: int, count: int) -> None:
    if len(sends.shapes) != count or len(expects.shapes) != count or sends.shapes[position] != expects.shapes[position]:
        raise _not_own("all_to_all", sends.shapes[position], expects.shapes, count)
    if x.numel() != sends.total:
        msg = f"all_to_all over {count} ranks sends {sends.total} elements of a tensor of {x.numel()}"
        raise CollectiveMismatchError(msg)


def _own(shape: Shape, x: torch.Tensor) -> bool:
    return tuple(shape) == tuple(x.shape)


def _check_own(operation: str, own: torch.Tensor, shapes: Sequence[Shape], position: int, count: int) -> None:
    if len(shapes) != count or not _own(shapes[position], own):
        raise _not_own(operation, tuple(own.shape), shapes, count)


def _not_own(operation: str, own: Shape, shapes: Sequence[Shape], count: int) -> CollectiveMismatchError:
    named = [list(shape) for shape in shapes]
    return CollectiveMismatchError(
        f"{operation} over {count} ranks sends {list(own)} to itself, but its shapes are {named}"
    )


def join_world(**arguments: Any) -> None:
    """Call ``torch.distributed.init_process_group`` with these arguments.

    Raises:
        RendezvousError: the rendezvous port is in use, or ranks did not meet within the time limit.
    """
    try:
        dist.init_process_group(**arguments)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = str(error).partition("\n")[0]
        if "EADDRINUSE" in text:
            port = re.search(r"port: (\d+)", text)
            msg = (
                f"init_process_group: the rendezvous port {port[1] if port else '?'} is in use; stop the process that "
                "listens on it, set MASTER_PORT to a free port, or let `torchrun --standalone` choose one"
            )
        elif "imeout" in text or "imed out" in text:
            msg = _did_not_meet(arguments.get("rank", os.environ.get("RANK", "?")), text)
        else:
            raise
        raise RendezvousError(msg) from error


def _did_not_meet(rank: object, text: str) -> str:
    """Return the error of a rank whose rendezvous timed out, from the engine's ``text``."""
    fix = "a rank that had joined stopped responding: look at its output and at the link to its host"
    if "connect to" in text:
        fix = "start rank 0 there, and check MASTER_ADDR, MASTER_PORT and the link to that host"
    elif "clients joined" in text:
        fix = "start the others, and look at their output and at the links to their hosts"
    return f"init_process_group: rank {rank} on host {socket.gethostname()} did not meet the other ranks: {text} {fix}"


def start_gloo(rank: int, world_size: int, init_method: str) -> C10dTransport:
    """Join a gloo world by ``env://`` under torchrun or by a shared ``file://``; a coordinator monitors this rank."""
    join_world(backend="gloo", init_method=init_method, rank=rank, world_size=world_size)
    return C10dTransport(watched=True)


def start_world(device: str, rank: int, world_size: int, init_method: str, rehearsed: str = "") -> C10dTransport:
    """Join a world on ``cpu`` (gloo), ``cuda`` (NCCL) or ``npu`` (HCCL), where rank i takes device i.

    With more ranks than devices, ranks share devices and send their tensors through host memory over gloo, because
    engines reject two ranks on a device. ``rehearsed`` names an engine whose limits gloo's calls are checked against.

    Raises:
        UnsupportedOnBackend: PyTorch sees no such device.
        ValueError: the engine cannot be rehearsed here.
    """
    devices = None if device == "cpu" else _devices(device)
    if devices is not None:
        devices.set_device(rank % devices.device_count())
    rules = rules_of(rehearsed)
    if rules is not None:
        engine = register_engine(rules)
    elif devices is None:
        return start_gloo(rank, world_size, init_method)
    else:
        engine = _ENGINES[device] if world_size <= devices.device_count() else register_engine(None)
    join_world(backend=engine, init_method=init_method, rank=rank, world_size=world_size)
    return C10dTransport(watched=True)


def _devices(device: str) -> Any:
    """Return ``torch.cuda`` or ``torch.npu``, which must see at least one device."""
    problem = missing_device(device)
    if problem:
        msg = f"device {device}: PyTorch sees no such device; {problem}, or use --device cpu"
        raise UnsupportedOnBackend(msg)
    return getattr(torch, device)

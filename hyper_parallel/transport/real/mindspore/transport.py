"""MindSpore's transports: HCCL on Ascend devices, a bridge over numpy, and the CPU rehearsal over gloo."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.mint import distributed

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.base import (
    ORDERED_REDUCTIONS,
    WORLD,
    Channel,
    EngineTransport,
    Parts,
    Ranks,
    Shape,
    Transport,
    by_rank,
    check_ranks,
    check_reduction,
    unknown_group,
)
from hyper_parallel.transport.failures import NEEDS_GLOO
from hyper_parallel.transport.frontends.mindspore_comm import begin, begin_again
from hyper_parallel.transport.frontends.mindspore_comm.host import from_host, on_accelerator, to_host
from hyper_parallel.transport.frontends.mindspore_comm.world import NamedGroups, active_world
from hyper_parallel.transport.real.guarded import GuardedTransport
from hyper_parallel.transport.real.mindspore.gathering_endpoint import GatheringEndpoint
from hyper_parallel.transport.simulated.endpoint import Endpoint
from hyper_parallel.transport.simulated.transport import SimulatedTransport
from hyper_parallel.transport.work import Work

__all__ = [
    "HcclTransport",
    "NumpyBridge",
    "begin_simulated",
    "compute_on_cpu",
    "connect",
    "from_host",
    "rehearse_over",
    "seed_rank",
    "start_rank",
    "start_rehearsal",
    "to_host",
]

_FLOATING = (mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.float64)
_COMPLEX = (mindspore.complex64, mindspore.complex128)
_FOLDS = {
    "sum": mint.add,
    "avg": mint.add,
    "prod": mint.mul,
    "max": mint.maximum,
    "min": mint.minimum,
    "all": mint.logical_and,
    "any": mint.logical_or,
}


class NumpyBridge(NamedGroups):
    """MindSpore tensors over any transport that works on host arrays.

    Args:
        inner: the transport underneath; its results must be new arrays, since they become the memory of tensors.
        to_host: converts a MindSpore tensor to an array for ``inner``.
        from_host: converts a result of ``inner`` to a MindSpore tensor.
    """

    def __init__(
        self,
        inner: Transport,
        to_host: Callable[[Tensor], Any] = to_host,
        from_host: Callable[[Any], Tensor] = from_host,
    ) -> None:
        super().__init__(inner)
        self.framework = "mindspore"
        self._to_host = to_host
        self._from_host = from_host

    def all_reduce(self, x: Tensor, op: str, ranks: Ranks) -> Tensor:
        """See :meth:`Transport.all_reduce`."""
        return self._from_host(self._inner.all_reduce(self._to_host(x), op, ranks))

    def all_gather(self, x: Tensor, ranks: Ranks, shapes: Sequence[Shape]) -> list[Tensor]:
        """See :meth:`Transport.all_gather`."""
        return [self._from_host(part) for part in self._inner.all_gather(self._to_host(x), ranks, shapes)]

    def reduce_scatter(self, chunks: Sequence[Tensor], op: str, ranks: Ranks) -> Tensor:
        """See :meth:`Transport.reduce_scatter`."""
        return self._from_host(self._inner.reduce_scatter([self._to_host(chunk) for chunk in chunks], op, ranks))

    def all_to_all(self, x: Tensor, ranks: Ranks, sends: Parts, expects: Parts) -> Tensor:
        """See :meth:`Transport.all_to_all`."""
        return self._from_host(self._inner.all_to_all(self._to_host(x), ranks, sends, expects))

    def all_gather_rows(self, x: Tensor, ranks: Ranks, shapes: tuple[Shape, ...]) -> Tensor:
        """See :meth:`RowCollectives.all_gather_rows`."""
        return self._from_host(self._inner.all_gather_rows(self._to_host(x), ranks, shapes))

    def reduce_scatter_rows(self, rows: Tensor, op: str, ranks: Ranks, shapes: tuple[Shape, ...]) -> Tensor:
        """See :meth:`RowCollectives.reduce_scatter_rows`."""
        return self._from_host(self._inner.reduce_scatter_rows(self._to_host(rows), op, ranks, shapes))

    def all_to_all_rows(
        self, rows: Tensor, ranks: Ranks, sends: tuple[Shape, ...], expects: tuple[Shape, ...]
    ) -> Tensor:
        """See :meth:`RowCollectives.all_to_all_rows`."""
        return self._from_host(self._inner.all_to_all_rows(self._to_host(rows), ranks, sends, expects))

    def broadcast(self, x: Tensor, src: int, ranks: Ranks) -> Tensor:
        """See :meth:`Transport.broadcast`."""
        return self._from_host(self._inner.broadcast(self._to_host(x), src, ranks))

    def send(self, x: Tensor, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """See :meth:`Transport.send`."""
        self._inner.send(self._to_host(x), dst, tag, channel)

    def recv(self, like: Tensor, src: int, tag: int = 0, channel: Channel = WORLD) -> Tensor:
        """See :meth:`Transport.recv`."""
        return self._from_host(self._inner.recv(self._to_host(like), src, tag, channel))

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        return self._inner.all_gather_object(obj, ranks)

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        self._inner.barrier(ranks)

    def start(self, operation: str, *args: Any) -> Work:
        """See :meth:`Transport.start`."""
        first, *rest = args
        chunks = operation == "reduce_scatter"
        data = [self._to_host(chunk) for chunk in first] if chunks else self._to_host(first)
        return self._inner.start(operation, data, *rest).then(self._arrived)

    def _arrived(self, result: Any) -> Any:
        if isinstance(result, list):
            return [self._from_host(part) for part in result]
        return None if result is None else self._from_host(result)


def compute_on_cpu() -> None:
    """Let this process compute on CPU; call it before the first operator, or MindSpore with its plugin uses Ascend."""
    if on_accelerator():
        mindspore.set_device("CPU")


def start_rank(inner: SimulatedTransport) -> NumpyBridge:
    """Begin a simulated rank in a worker process, which may have served another run: set the seed, make a new world."""
    compute_on_cpu()
    return begin_simulated(inner)


def begin_simulated(inner: SimulatedTransport) -> NumpyBridge:
    """Begin a simulated rank on the device of its process."""
    mindspore.manual_seed(0)
    mindspore.set_seed(0)  # operators on CPU draw from this seed
    begin(inner.rank, inner.world_size, inner.endpoint)
    return NumpyBridge(inner)


def start_rehearsal(rank: int, world_size: int, init_method: str) -> NumpyBridge:
    """Join a CPU world over gloo from PyTorch, in this same process.

    MindSpore's own CPU engine (MCCL) is not used: it reduces by sum alone, has no reduce-scatter, all-to-all or
    point-to-point, and silently truncates int64 and float64.

    Raises:
        UnsupportedOnBackend: PyTorch, which this rehearsal needs, is not installed.
    """
    try:
        from hyper_parallel.transport.real import c10d  # an optional dependency of this rehearsal alone
    except ImportError as error:
        raise UnsupportedOnBackend(NEEDS_GLOO) from error
    mindspore.manual_seed(0)
    mindspore.set_seed(0)  # operators on CPU draw from this seed
    return rehearse_over(c10d.start_gloo(rank, world_size, init_method))


def rehearse_over(inner: Transport) -> NumpyBridge:
    """MindSpore tensors over a transport of PyTorch's tensors in the same process."""
    from hyper_parallel.transport.real import c10d  # an optional dependency of this rehearsal alone

    compute_on_cpu()
    endpoint: Endpoint = GatheringEndpoint(inner, c10d.from_host, c10d.to_host)
    if isinstance(inner, GuardedTransport):  # a launched rank: MindSpore's own collectives use its coordinator too
        endpoint = inner.endpoint
    begin(inner.rank, inner.world_size, endpoint)
    return NumpyBridge(inner, lambda x: c10d.from_host(to_host(x)), lambda y: from_host(c10d.to_host(y)))


def seed_rank() -> None:
    """Set a fixed seed, since the process may have served another run.

    If a coordinator transfers MindSpore's own collectives, they get a new world; over HCCL they use the engine's world.
    """
    mindspore.manual_seed(0)
    mindspore.set_seed(0)  # operators on CPU draw from this seed
    if active_world() is not None:
        begin_again()


# What HCCL reduces itself; every other dtype and reduction is gathered and reduced in rank order.
_HCCL_OPS = {"sum": "sum", "avg": "sum", "prod": "prod", "max": "max", "min": "min"}
_HCCL_DTYPES = (mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.int8, mindspore.int32)


class HcclTransport(EngineTransport):
    """Collectives of MindSpore tensors on Ascend devices, by ``mindspore.mint.distributed``.

    This class follows the documented interface of MindSpore 2.10. It has been tested with an engine that imitates this
    interface, and has never run on a real HCCL, which needs Ascend hardware. Tensors are sent flat, so uneven and 0-d
    shapes work. HCCL does not support bool and complex: bool is sent as uint8, and complex as its two parts.

    Args:
        engine: object with the functions of ``mindspore.mint.distributed``; that module itself by default, with its
            process group initialised.
    """

    backend = "hccl"
    framework = "mindspore"
    survives_mismatch = False

    def __init__(self, engine: Any = distributed) -> None:
        self._engine = engine
        self.rank = engine.get_rank()
        self.world_size = engine.get_world_size()
        self._groups: dict[Ranks, Any] = {}
        self._dropped: set[Any] = set()

    def send(self, x: Tensor, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """See :meth:`Transport.send`; an empty tensor needs no message, and HCCL matches messages by their order."""
        del tag, channel
        if 0 not in x.shape:
            self._engine.send(_flat(x), dst)

    def recv(self, like: Tensor, src: int, tag: int = 0, channel: Channel = WORLD) -> Tensor:
        """See :meth:`Transport.recv`."""
        del tag, channel
        carried = _empty_like(_flat(like))
        if 0 not in like.shape:
            self._engine.recv(carried, src)
        return _unflat(carried, like, like.shape)

    def all_gather_rows(self, x: Tensor, ranks: Ranks, shapes: tuple[Shape, ...]) -> Tensor:
        """See :meth:`RowCollectives.all_gather_rows`."""
        del shapes
        return _stacked(self.all_gather(x, ranks, [x.shape] * len(ranks)))

    def reduce_scatter_rows(self, rows: Tensor, op: str, ranks: Ranks, shapes: tuple[Shape, ...]) -> Tensor:
        """See :meth:`RowCollectives.reduce_scatter_rows`."""
        del shapes
        return self.reduce_scatter([rows[index] for index in range(len(ranks))], op, ranks)

    def all_to_all_rows(
        self, rows: Tensor, ranks: Ranks, sends: tuple[Shape, ...], expects: tuple[Shape, ...]
    ) -> Tensor:
        """See :meth:`RowCollectives.all_to_all_rows`."""
        del sends, expects
        parts = Parts.of([rows.shape[1:]] * len(ranks))
        return self.all_to_all(rows, ranks, parts, parts).reshape(rows.shape)

    def _all_reduce(self, x: Tensor, op: str, ranks: Ranks) -> Work:
        check_ranks(ranks, self.rank, self.world_size)
        check_reduction(op, inexact=_inexact(x))
        if len(ranks) == 1 or 0 in x.shape or not _native(x, op):
            return self._all_gather(x, ranks, [x.shape] * len(ranks)).then(lambda parts: _fold(parts, op))
        flat = _fresh(x.reshape(-1))
        work = self._engine.all_reduce(flat, _HCCL_OPS[op], self.group(ranks), async_op=True)

        def finish() -> Tensor:
            _finish(work)
            total = flat.reshape(x.shape)
            return mint.div(total, len(ranks)) if op == "avg" else total

        return Work("all_reduce", finish)

    def _all_gather(self, x: Tensor, ranks: Ranks, shapes: Sequence[Shape]) -> Work:
        check_ranks(ranks, self.rank, self.world_size)
        sizes = [math.prod(shape) * _width(x) for shape in shapes]
        flat = _pad(_flat(x), max(sizes))
        if len(ranks) == 1 or not max(sizes):
            own = [_unflat(_fresh(flat), x, shape) for shape in shapes]
            return Work("all_gather", lambda: own)
        parts = [_empty_like(flat) for _ in ranks]
        ordered = [parts[position] for position in by_rank(ranks)]
        work = self._engine.all_gather(ordered, flat, self.group(ranks), async_op=True)

        def finish() -> list[Tensor]:
            _finish(work)
            return [_unflat(_head(part, size), x, shape)
                    for part, size, shape in zip(parts, sizes, shapes, strict=True)]  # fmt: skip

        return Work("all_gather", finish)

    def _reduce_scatter(self, chunks: Sequence[Tensor], op: str, ranks: Ranks) -> Work:
        position = check_ranks(ranks, self.rank, self.world_size)
        check_reduction(op, inexact=_inexact(chunks[0]))
        own = chunks[position]
        largest = max(math.prod(chunk.shape) for chunk in chunks)
        if len(ranks) == 1 or not largest or not _native(own, op):
            sends, expects = Parts.of(chunk.shape for chunk in chunks), Parts.of([own.shape] * len(ranks))
            exchanged = self._all_to_all(mint.cat([chunk.reshape(-1) for chunk in chunks]), ranks, sends, expects)
            return exchanged.then(lambda flat: _fold(_parts(flat, expects), op))
        rows = mint.cat([_pad(_flat(chunks[index]), largest) for index in by_rank(ranks)])
        mine = mint.zeros((largest,), dtype=own.dtype)
        work = self._engine.reduce_scatter_tensor(mine, rows, _HCCL_OPS[op], self.group(ranks), async_op=True)

        def finish() -> Tensor:
            _finish(work)
            kept = _unflat(_head(mine, math.prod(own.shape)), own, own.shape)
            return mint.div(kept, len(ranks)) if op == "avg" else kept

        return Work("reduce_scatter", finish)

    def _all_to_all(self, x: Tensor, ranks: Ranks, sends: Parts, expects: Parts) -> Work:
        check_ranks(ranks, self.rank, self.world_size)
        flat, shape = _flat(x), (expects.total,)
        if len(ranks) == 1:
            kept = _unflat(_fresh(flat), x, shape)
            return Work("all_to_all", lambda: kept)
        order, width = by_rank(ranks), _width(x)
        outgoing, incoming = ([size * width for size in parts.of_members(order)] for parts in (sends, expects))
        moved = order != list(range(len(ranks)))
        sent = _reordered(flat, [size * width for size in sends.sizes], order) if moved else flat
        arrived = mint.zeros((sum(incoming),), dtype=flat.dtype)
        work = self._engine.all_to_all_single(arrived, sent, incoming, outgoing, self.group(ranks), async_op=True)

        def finish() -> Tensor:
            _finish(work)
            places = sorted(range(len(ranks)), key=order.__getitem__)
            return _unflat(_reordered(arrived, incoming, places) if moved else arrived, x, shape)

        return Work("all_to_all", finish)

    def _broadcast(self, x: Tensor, src: int, ranks: Ranks) -> Work:
        check_ranks(ranks, self.rank, self.world_size)
        check_ranks(ranks, src, self.world_size)
        carried = _fresh(_flat(x))
        work = None
        if len(ranks) > 1 and carried.shape[0]:
            work = self._engine.broadcast(carried, src, self.group(ranks), async_op=True)

        def finish() -> Tensor:
            _finish(work)
            return _unflat(carried, x, x.shape)

        return Work("broadcast", finish)

    def _send(self, x: Tensor, dst: int, tag: int = 0, channel: Channel = WORLD) -> Work:
        del tag, channel
        work = self._engine.isend(_fresh(_flat(x)), dst) if 0 not in x.shape else None
        return Work("send", lambda: _finish(work))

    def _recv(self, like: Tensor, src: int, tag: int = 0, channel: Channel = WORLD) -> Work:
        del tag, channel
        carried = _empty_like(_flat(like))
        work = self._engine.irecv(carried, src) if 0 not in like.shape else None

        def finish() -> Tensor:
            _finish(work)
            return _unflat(carried, like, like.shape)

        return Work("recv", finish)

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        check_ranks(ranks, self.rank, self.world_size)
        gathered: list[Any] = [None] * len(ranks)
        self._engine.all_gather_object(gathered, obj, self.group(ranks))
        ordered = dict(zip(by_rank(ranks), gathered, strict=True))
        return [ordered[position] for position in range(len(ranks))]

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        check_ranks(ranks, self.rank, self.world_size)
        self._engine.barrier(self.group(ranks))

    def group(self, ranks: Ranks) -> Any:
        """Return the name of the communication group of ``ranks``, in rank order as in MindSpore."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            whole = key == tuple(range(self.world_size))
            self._groups[key] = self._engine.new_group(None if whole else list(key))
            self._dropped.discard(self._groups[key])  # the same ranks give the same name
        return self._groups[key]

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`.

        Raises:
            MeshError: ``group`` is not a group of this world, or was destroyed.
        """
        if group is None:
            return tuple(range(self.world_size))
        try:
            if isinstance(group, str) and group not in self._dropped:
                return tuple(self._engine.get_process_group_ranks(group))
        except (KeyError, ValueError, RuntimeError):  # the type depends on MindSpore's build
            pass
        raise unknown_group(group, self._groups)

    def known_group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.known_group`."""
        return self._groups.get(tuple(sorted(ranks)))

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`."""
        if isinstance(group, str):  # MindSpore's own functions may have built it again, with the name that it had
            self._dropped.discard(group)
        self._groups[tuple(sorted(self.ranks_of(group)))] = group

    def drop(self, group: Any) -> None:
        """See :meth:`Transport.drop`."""
        ranks = tuple(sorted(self.ranks_of(group)))
        self._engine.destroy_process_group(group)
        self._dropped.add(group)
        if self._groups.get(ranks) == group:
            del self._groups[ranks]

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._groups.clear()
        self._engine.destroy_process_group()


def connect(backend: str = "hccl", **options: Any) -> HcclTransport:
    """Join, over HCCL, the world that msrun's environment variables describe.

    Args:
        backend: ``hccl``.
        options: options of ``mindspore.mint.distributed.init_process_group``.

    Raises:
        UnsupportedOnBackend: ``backend`` is not ``hccl``; MCCL in particular computes wrong results silently.
    """
    if backend == "mccl":
        msg = (
            "MCCL, MindSpore's engine on CPU, is refused: it silently truncates int64 and float64, reduces by sum "
            "alone and has no reduce-scatter, all-to-all or send; rehearse over gloo: init_process_group('gloo')"
        )
        raise UnsupportedOnBackend(msg)
    if backend != "hccl":
        msg = f"backend {backend!r} is not a backend of MindSpore; use 'hccl'"
        raise UnsupportedOnBackend(msg)
    distributed.init_process_group("hccl", **options)
    return HcclTransport()


def _finish(work: Any) -> None:
    """Wait for the engine's work; the engine returns None if there is nothing to wait for."""
    if work is not None:
        work.wait()


def _inexact(x: Tensor) -> bool:
    return x.dtype in _FLOATING or x.dtype in _COMPLEX


def _native(x: Tensor, op: str) -> bool:
    """Whether HCCL reduces ``x`` itself; in deterministic mode, terms are gathered and added in rank order instead."""
    if mindspore.get_context("deterministic") == "ON" and op in ORDERED_REDUCTIONS:
        return False
    return op in _HCCL_OPS and x.dtype in _HCCL_DTYPES


def _width(x: Tensor) -> int:
    """Return the number of transferred elements that encode one element of ``x``."""
    return 2 if x.dtype in _COMPLEX else 1


def _flat(x: Tensor) -> Tensor:
    """Return flat ``x`` in a dtype that HCCL supports."""
    if x.dtype == mindspore.bool_:
        return x.astype(mindspore.uint8).reshape(-1)
    if x.dtype in _COMPLEX:
        if 0 in x.shape:  # real and imag reject empty tensors
            return mint.zeros((0,), dtype=mindspore.float32 if x.dtype == mindspore.complex64 else mindspore.float64)
        return mint.cat([mint.real(x).reshape(-1, 1), mint.imag(x).reshape(-1, 1)], 1).reshape(-1)
    return x.reshape(-1)


def _unflat(flat: Tensor, like: Tensor, shape: Shape) -> Tensor:
    """Return the tensor of ``like``'s dtype that ``flat`` encodes."""
    if 0 in tuple(shape):
        return mint.zeros(tuple(shape), dtype=like.dtype)
    if like.dtype in _COMPLEX:
        pairs = flat.reshape(-1, 2)
        flat = ops.Complex()(_fresh(pairs[:, 0]), _fresh(pairs[:, 1]))
    return flat.astype(like.dtype).reshape(tuple(shape))


def _fresh(flat: Tensor) -> Tensor:
    """Return a copy of a 1-D tensor; only concatenation copies views correctly on every device."""
    return mint.cat([flat]) if flat.shape[0] else _empty_like(flat)


def _empty_like(flat: Tensor) -> Tensor:
    return mint.zeros(flat.shape, dtype=flat.dtype)


def _pad(flat: Tensor, size: int) -> Tensor:
    missing = size - flat.shape[0]
    return mint.cat([flat, mint.zeros((missing,), dtype=flat.dtype)]) if missing else flat


def _head(flat: Tensor, size: int) -> Tensor:
    return flat if flat.shape[0] == size else _fresh(flat[:size])


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return a new tensor with the equal-shaped ``parts`` as rows."""
    shape = parts[0].shape
    if 0 in shape:
        return mint.zeros((len(parts), *shape), dtype=parts[0].dtype)
    return mint.cat([part.reshape((1, *shape)) for part in parts])


def _parts(flat: Tensor, parts: Parts) -> list[Tensor]:
    """Return the parts of a flat tensor, each in its shape and with its own memory."""
    return [
        _fresh(flat[start : start + size]).reshape(shape)
        for start, size, shape in zip(parts.starts, parts.sizes, parts.shapes, strict=True)
    ]


def _reordered(flat: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the parts of ``flat``, with ``sizes``, in a different order."""
    parts = mint.split(flat, list(sizes))
    return mint.cat([parts[index] for index in order])


def _fold(parts: Sequence[Tensor], op: str) -> Tensor:
    """Fold ``parts`` from the left; ``avg`` divides the sum once, at the end."""
    dtype = parts[0].dtype
    if 0 in parts[0].shape:
        return mint.zeros(parts[0].shape, dtype=dtype)
    if dtype == mindspore.bool_:  # arithmetic on booleans, as PyTorch and numpy define it
        op = {"sum": "any", "max": "any", "prod": "all", "min": "all"}.get(op, op)
    if op in ("all", "any"):
        parts = [part.astype(mindspore.bool_) for part in parts]
    total = parts[0]
    keeps_nan = op in ("max", "min") and dtype in _FLOATING
    for part in parts[1:]:
        folded = _FOLDS[op](total, part)
        total = _with_nan(folded, total, part) if keeps_nan else folded
    total = mint.div(total, len(parts)) if op == "avg" else total
    return total.astype(dtype)


def _with_nan(folded: Tensor, *operands: Tensor) -> Tensor:
    """Return ``folded`` with NaN where an operand is NaN: MindSpore's CPU kernels of maximum and minimum lose some."""
    for operand in operands:
        folded = mint.where(mint.ne(operand, operand), operand, folded)
    return folded

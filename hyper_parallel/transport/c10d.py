"""PyTorch's transports: the host operations of simulated ranks, and real collectives over ``torch.distributed``.

What only moves data moves it as bytes, so every dtype, stride and size works on every backend. What reduces uses
the backend's own reduction where the backend is an accelerator's and knows the dtype; everywhere else (gloo, bool,
complex, float64 on HCCL) it gathers and folds in the order of ``ranks``, which is what the simulation does too.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.errors import CollectiveMismatchError, MeshError, RendezvousError
from hyper_parallel.transport.base import WORLD, Channel, Ranks, Shape
from hyper_parallel.transport.calls import after_dropped, check_ranks, check_reduction
from hyper_parallel.transport.generators import GeneratorStates, restore_generators, save_generators
from hyper_parallel.transport.gloo import GlooMessages, bytes_of, from_bytes, started
from hyper_parallel.transport.layers import EngineTransport
from hyper_parallel.transport.numpy_ops import BFLOAT16
from hyper_parallel.transport.pending import Pending

__all__ = [
    "C10dTransport",
    "TorchOps",
    "from_host",
    "guard_functions",
    "reduce_in_order",
    "seed_rank",
    "start_gloo",
    "start_world",
    "to_host",
]

_ACCUMULATE = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "all": torch.logical_and,
    "any": torch.logical_or,
}

# Reductions and dtypes that accelerators' engines compute themselves; the rest is folded in rank order.
_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_NATIVE_OPTIONS = {name: _options(op) for name, op in _NATIVE_OPS.items()}
_COMMON_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64})
# "fake" is PyTorch's engine that moves nothing: host costs are measured on it, as an accelerator would have them.
_NATIVE_DTYPES = {
    "nccl": _COMMON_DTYPES | {torch.float64, torch.uint8},
    "hccl": _COMMON_DTYPES,
    "fake": _COMMON_DTYPES,
}

# Below this many elements gathering everything beats the two steps of scattering and gathering.
_SMALL = 16384


def to_host(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of ``x`` as a numpy array (:data:`BFLOAT16` for bfloat16); may share memory with ``x``."""
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return plain.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return plain.numpy()


def from_host(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A CPU tensor that shares the memory of ``array``."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class TorchOps:
    """:class:`HostOps` for tensors of PyTorch, on any device."""

    def shape(self, x: torch.Tensor) -> Shape:
        """Sizes of ``x``."""
        return tuple(x.shape)

    def dtype(self, x: torch.Tensor) -> str:
        """``torch.float32`` and so on."""
        return str(x.dtype)

    def inexact(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is floating or complex."""
        return x.is_floating_point() or x.is_complex()

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous detached copy."""
        return x.detach().clone(memory_format=torch.contiguous_format)

    def reduce(self, parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        """Fold ``parts`` from the left with ``op``; ``avg`` divides the sum once, at the end."""
        return reduce_in_order(parts, op)

    def save_state(self) -> tuple[torch.Tensor, torch.dtype, GeneratorStates]:
        """States of the generators (PyTorch's default one for CPU, Python's, NumPy's), and the default dtype."""
        return torch.default_generator.get_state(), torch.get_default_dtype(), save_generators()

    def restore_state(self, state: tuple[torch.Tensor, torch.dtype, GeneratorStates]) -> None:
        """Put back what :meth:`save_state` returned."""
        generator, dtype, others = state
        torch.default_generator.set_state(generator)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        restore_generators(others)


def reduce_in_order(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Fold equal-shaped ``parts`` from the left with ``op`` of ``REDUCTIONS``; a new tensor of their dtype.

    Raises:
        ReductionError: ``op`` is unknown, or ``avg`` of integers.
    """
    first = parts[0]
    check_reduction(op, inexact=first.is_floating_point() or first.is_complex())
    accumulate: Any = _ACCUMULATE[op]
    total = first.detach().clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        accumulate(total, part.detach(), out=total)
    if op in ("all", "any") and len(parts) == 1:
        return total.to(torch.bool).to(first.dtype)
    return total.div_(len(parts)) if op == "avg" else total


class C10dTransport(EngineTransport):
    """Collectives over an initialised ``torch.distributed`` world (gloo, NCCL, HCCL).

    Groups are built on first use, by their members only, and cached. ``torch.distributed`` orders the members of a
    group by global rank; results are put into the order of ``ranks`` here.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.backend = str(dist.get_backend())
        self._checked: set[Ranks] = set()
        self._groups: dict[Ranks, Any] = {tuple(range(self.world_size)): dist.group.WORLD}
        self._retired: dict[Ranks, Any] = {}
        self._dropped: dict[Ranks, int] = {}
        self._claims: dict[Ranks, int] = {}
        self._builds: dict[Ranks, int] = {}
        self._messages = GlooMessages()

    def all_reduce(self, x: torch.Tensor, op: str, ranks: Ranks) -> torch.Tensor:
        """See :meth:`Transport.all_reduce`."""
        if ranks not in self._checked:
            check_ranks(ranks, self.rank, self.world_size)
            self._checked.add(ranks)
        if len(ranks) > 1 and x.numel() and self._native(x.dtype, op):
            own = x.detach() if x.requires_grad else x
            total = own.clone(memory_format=torch.contiguous_format)
            # The group's own call: the module-level function costs as much again in logging.
            self.group(ranks).allreduce([total], _NATIVE_OPTIONS[op]).wait()
            return total.div_(len(ranks)) if op == "avg" else total
        check_reduction(op, inexact=x.is_floating_point() or x.is_complex())
        if len(ranks) == 1 or not x.numel():
            return reduce_in_order([x], op)
        # Vector code rounds complex products by where an element lies, so those are not cut into pieces.
        if x.numel() <= _SMALL or x.is_complex():
            return reduce_in_order(self.all_gather(x, ranks, [tuple(x.shape)] * len(ranks)), op)
        pieces = x.detach().reshape(-1).tensor_split(len(ranks))
        mine = self.reduce_scatter(pieces, op, ranks)
        return torch.cat(self.all_gather(mine, ranks, [tuple(piece.shape) for piece in pieces])).reshape(x.shape)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """See :meth:`Transport.send`; an empty tensor needs no message, but on gloo, where its label is one."""
        if self._by_pieces(dst):
            self._send(x, dst, tag, channel).wait()
        elif x.numel():
            dist.send(bytes_of(x), dst, tag=tag)

    def recv(self, like: torch.Tensor, src: int, tag: int = 0, channel: Channel = WORLD) -> torch.Tensor:
        """See :meth:`Transport.recv`."""
        return self._recv(like, src, tag, channel).wait()

    def _all_reduce(self, x: torch.Tensor, op: str, ranks: Ranks) -> Pending:
        check_ranks(ranks, self.rank, self.world_size)
        check_reduction(op, inexact=x.is_floating_point() or x.is_complex())
        if len(ranks) == 1 or not x.numel() or not self._native(x.dtype, op):
            # In one collective: the two steps of large blocking ones would need somebody to begin the second.
            return self._all_gather(x, ranks, [tuple(x.shape)] * len(ranks)).then(
                lambda parts: reduce_in_order(parts, op)
            )
        total = x.detach().clone(memory_format=torch.contiguous_format)
        work = self.group(ranks).allreduce([total], _NATIVE_OPTIONS[op])

        def finish() -> torch.Tensor:
            work.wait()
            return total.div_(len(ranks)) if op == "avg" else total

        return Pending("all_reduce", finish, total)

    def _all_gather(self, x: torch.Tensor, ranks: Ranks, shapes: Sequence[Shape]) -> Pending:
        _check_told("all_gather", x, shapes, check_ranks(ranks, self.rank, self.world_size), len(ranks))
        sizes = [math.prod(shape) * x.element_size() for shape in shapes]
        largest = max(sizes)
        if len(ranks) == 1 or not largest:
            own = [x.detach().clone(memory_format=torch.contiguous_format) if _own(shape, x) else x.new_empty(shape)
                   for shape in shapes]  # fmt: skip
            return Pending("all_gather", lambda: own)
        ours = bytes_of(x)
        if ours.numel() < largest:
            ours = torch.cat([ours, ours.new_zeros(largest - ours.numel())])
        parts = [torch.empty_like(ours) for _ in ranks]
        work = started(
            dist.all_gather([parts[place] for place in _by_rank(ranks)], ours, group=self.group(ranks), async_op=True)
        )

        def finish() -> list[torch.Tensor]:
            work(ours)
            return [from_bytes(part, size, x.dtype, shape)
                    for part, size, shape in zip(parts, sizes, shapes, strict=True)]  # fmt: skip

        return Pending("all_gather", finish)

    def _reduce_scatter(self, chunks: Sequence[torch.Tensor], op: str, ranks: Ranks) -> Pending:
        position = check_ranks(ranks, self.rank, self.world_size)
        first = chunks[0]
        check_reduction(op, inexact=first.is_floating_point() or first.is_complex())
        own = tuple(chunks[position].shape)
        if len(ranks) > 1 and self._native(first.dtype, op):
            return self._native_reduce_scatter(chunks, op, ranks, own)
        return self._all_to_all(chunks, ranks, [own] * len(ranks)).then(lambda parts: reduce_in_order(parts, op))

    def _all_to_all(self, chunks: Sequence[torch.Tensor], ranks: Ranks, shapes: Sequence[Shape]) -> Pending:
        position = check_ranks(ranks, self.rank, self.world_size)
        _check_told("all_to_all", chunks[position], shapes, position, len(ranks))
        dtype, item = chunks[0].dtype, chunks[0].element_size()
        sizes = [math.prod(shape) * item for shape in shapes]
        order = _by_rank(ranks)
        outgoing = [bytes_of(chunks[place]) for place in order]
        if len(ranks) == 1:
            kept = from_bytes(outgoing[0].clone(), sizes[0], dtype, shapes[0])
            return Pending("all_to_all", lambda: [kept])
        received, given = outgoing[0].new_empty(sum(sizes)), torch.cat(outgoing)
        in_splits, out_splits = [part.numel() for part in outgoing], [sizes[place] for place in order]
        work = started(
            dist.all_to_all_single(received, given, out_splits, in_splits, group=self.group(ranks), async_op=True)
        )

        def finish() -> list[torch.Tensor]:
            work(given)
            arrived = dict(zip(order, torch.split(received, out_splits), strict=True))
            # Cloned, since results that share a storage share a version counter, which autograd would trip over.
            return [
                from_bytes(arrived[place].clone(), sizes[place], dtype, shapes[place]) for place in range(len(ranks))
            ]

        return Pending("all_to_all", finish)

    def _broadcast(self, x: torch.Tensor, src: int, ranks: Ranks) -> Pending:
        check_ranks(ranks, self.rank, self.world_size)
        check_ranks(ranks, src, self.world_size)
        carried = bytes_of(x).clone()
        result = from_bytes(carried, carried.numel(), x.dtype, tuple(x.shape))
        if len(ranks) == 1 or not carried.numel():
            return Pending("broadcast", lambda: result)
        work = started(dist.broadcast(carried, src, group=self.group(ranks), async_op=True))

        def finish() -> torch.Tensor:
            work(carried)
            return result

        return Pending("broadcast", finish, result)

    def _by_pieces(self, peer: int) -> bool:
        """Whether messages to and from ``peer`` travel in pieces: only gloo needs it."""
        return self.backend == "gloo" and peer != self.rank

    def _send(self, x: torch.Tensor, dst: int, tag: int = 0, channel: Channel = WORLD) -> Pending:
        if self._by_pieces(dst):
            return self._messages.send(x, dst, tag, channel)
        if not x.numel():
            return Pending("send", lambda: None)
        carried = bytes_of(x).clone()
        work = started(dist.isend(carried, dst, tag=tag))
        return Pending("send", lambda: work(carried))

    def _recv(self, like: torch.Tensor, src: int, tag: int = 0, channel: Channel = WORLD) -> Pending:
        if self._by_pieces(src):
            return self._messages.recv(like, src, tag, channel)
        size = like.numel() * like.element_size()
        if not size:
            return Pending("recv", lambda: torch.empty_like(like, memory_format=torch.contiguous_format))
        carried = torch.empty(size, dtype=torch.uint8, device=like.device)
        work = started(dist.irecv(carried, src, tag=tag))

        def finish() -> torch.Tensor:
            work(carried)
            return from_bytes(carried, size, like.dtype, tuple(like.shape))

        return Pending("recv", finish)

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        check_ranks(ranks, self.rank, self.world_size)
        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, obj, group=self.group(ranks))
        found = dict(zip(_by_rank(ranks), gathered, strict=True))
        return [found[place] for place in range(len(ranks))]

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`; on accelerators as an exchange of objects, which picks no wrong device."""
        if self.backend == "gloo":
            check_ranks(ranks, self.rank, self.world_size)
            dist.barrier(group=self.group(ranks))
        else:
            self.all_gather_object(None, ranks)

    def group(self, ranks: Ranks) -> Any:
        """A ``ProcessGroup`` of ``ranks``, in the order of their numbers as ``torch.distributed`` has it."""
        found = self._groups.get(ranks)
        if found is not None:
            return found
        key = tuple(sorted(ranks))
        if key not in self._groups:
            whole = key == tuple(range(self.world_size))
            self._groups[key] = dist.group.WORLD if whole else self._built(key, {})
        return self._groups[key]

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`.

        Raises:
            MeshError: ``group`` is no group of this world, or was destroyed.
        """
        if group is None:
            return tuple(range(self.world_size))
        try:
            if any(one is group for one in self._retired.values()):
                raise ValueError(group)  # noqa: TRY301 - it is told like what torch.distributed does not know
            return tuple(dist.get_process_group_ranks(group))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            known = [list(ranks) for ranks in self._groups]
            msg = (
                f"{group!r} is no group of this world, or was destroyed; "
                f"known are the groups of ranks {known}; create_group builds one"
            )
            raise MeshError(msg) from error

    def claimed(self, statement: str, ranks: Ranks) -> list[str]:
        """See :meth:`Transport.claimed`; members count what they start, so that one number names it, and tidy up."""
        check_ranks(ranks, self.rank, self.world_size)
        key = tuple(sorted(ranks))
        self._claims[key] = self._claims.get(key, 0) + 1
        name = f"hyper_parallel/started/{'-'.join(map(str, key))}/{self._claims[key]}"
        store = distributed_c10d._get_default_store()  # noqa: SLF001 - no public spelling
        turn = store.add(name, 1)
        store.set(f"{name}/{turn}", statement)
        found = [store.get(f"{name}/{earlier}").decode() for earlier in range(1, turn)]
        if store.add(f"{name}/read", 1) == len(key):  # nobody needs them any more
            for one in ("", "/read", *(f"/{turn}" for turn in range(1, len(key) + 1))):
                store.delete_key(name + one)
        return found

    def build_group(self, ranks: Ranks, **options: Any) -> Any:
        """See :meth:`Transport.build_group`."""
        key = tuple(sorted(ranks))
        self._groups[key] = self._built(key, options)
        return self._groups[key]

    def _built(self, key: Ranks, options: dict[str, Any]) -> Any:
        retired = None if options else self._retired.pop(key, None)
        if retired is not None:
            return retired
        self._builds[key] = self._builds.get(key, 0) + 1
        with _named(_name_of(key, self._builds[key])):
            return dist.new_group(list(key), use_local_synchronization=True, **options)

    def build_of(self, ranks: Ranks, group: Any = None) -> str:
        """See :meth:`Transport.build_of`: the name by which PyTorch's members meet, and what was destroyed before."""
        handle: Any = self._groups.get(ranks) if group is None else group
        usual = handle is None or handle is dist.group.WORLD or handle.group_name == _name_of(ranks, 1)
        names = ("" if usual else f"named {handle.group_name!r}", after_dropped(self._dropped.get(ranks, 0)))
        return ", ".join(filter(None, names))

    def known_group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.known_group`."""
        return self._groups.get(tuple(sorted(ranks)))

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`."""
        self._groups[tuple(sorted(self.ranks_of(group)))] = group

    def drop(self, group: Any) -> None:
        """See :meth:`Transport.drop`."""
        ranks = tuple(sorted(self.ranks_of(group)))
        # A second gloo group of the same ranks may find the first one's addresses in the store, and wait forever: the
        # first is kept for the next that asks. The end of the world's would be that of every other group: see close().
        if self.backend == "gloo" and group is not dist.group.WORLD:
            self._retired[ranks] = group
        elif group is not dist.group.WORLD:
            dist.destroy_process_group(group)
        if self._groups.get(ranks) is group:
            del self._groups[ranks]
            if group is not dist.group.WORLD:
                self._dropped[ranks] = self._dropped.get(ranks, 0) + 1

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._groups.clear()
        self._messages.close()
        dist.destroy_process_group()

    def _native(self, dtype: torch.dtype, op: str) -> bool:
        whole = op == "avg" and not dtype.is_floating_point
        return op in _NATIVE_OPS and not whole and dtype in _NATIVE_DTYPES.get(self.backend, ())

    def _native_reduce_scatter(self, chunks: Sequence[torch.Tensor], op: str, ranks: Ranks, own: Shape) -> Pending:
        """The engine's own reduce-scatter, on chunks padded to the largest."""
        largest = max(chunk.numel() for chunk in chunks)
        padded = chunks[0].new_zeros((len(chunks), largest))
        for row, place in enumerate(_by_rank(ranks)):
            padded[row, : chunks[place].numel()] = chunks[place].detach().reshape(-1)
        mine = padded.new_empty(largest)
        work = started(
            dist.reduce_scatter(mine, list(padded.unbind()), _NATIVE_OPS[op], group=self.group(ranks), async_op=True)
            if largest
            else None
        )

        def finish() -> torch.Tensor:
            work(padded)
            kept = mine[: math.prod(own)].clone().reshape(own)
            return kept.div_(len(ranks)) if op == "avg" else kept

        return Pending("reduce_scatter", finish)


def join_world(**given: Any) -> None:
    """``torch.distributed.init_process_group``.

    Raises:
        RendezvousError: the port at which ranks are to meet is in use.
    """
    try:
        dist.init_process_group(**given)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = re.search(r"port: (\d+)", str(error))
        msg = (
            f"init_process_group: port {port[1] if port else '?'}, at which ranks are to meet, is in use; end what "
            "listens there, set MASTER_PORT to a free port, or let `torchrun --standalone` choose one"
        )
        raise RendezvousError(msg) from error


def start_gloo(rank: int, world_size: int, init_method: str) -> C10dTransport:
    """Join a gloo world, by ``env://`` under torchrun or by a shared ``file://``, and its transport."""
    join_world(backend="gloo", init_method=init_method, rank=rank, world_size=world_size)
    return C10dTransport()


def start_world(device: str, rank: int, world_size: int, init_method: str) -> C10dTransport:
    """Join a world on ``cpu`` (gloo), ``cuda`` (NCCL) or ``npu`` (HCCL), where rank i takes card i."""
    if device == "cpu":
        return start_gloo(rank, world_size, init_method)
    cards: Any = getattr(torch, device)  # torch_npu adds torch.npu when PyTorch is imported
    cards.set_device(rank)
    backend = {"cuda": "nccl", "npu": "hccl"}[device]
    join_world(backend=backend, init_method=init_method, rank=rank, world_size=world_size)
    return C10dTransport()


def guard_functions(agree: Callable[..., None]) -> None:
    """Let ``torch.distributed``'s own collectives in this process be agreed upon first, too: users call them.

    Args:
        agree: called with the name, the ranks of the group and the facts on which all members must agree, before the
            collective starts; see :class:`hyper_parallel.transport.guarded.GuardedTransport`.
    """
    for name, facts in _GUARDED.items():
        guarded = _guarded(name, getattr(distributed_c10d, name), facts, agree)
        setattr(distributed_c10d, name, guarded)
        setattr(dist, name, guarded)


def _guarded(name: str, plain: Callable[..., Any], facts: Callable[..., Any], agree: Callable[..., None]) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals  # noqa: SLF001 - collectives that are made of others, and our own transport
        if caller is not globals() and caller is not vars(distributed_c10d):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            ranks = tuple(dist.get_process_group_ranks(_group(given)))
            if dist.get_rank() in ranks:
                agree(f"dist.{name}", ranks, facts(given), wait=not given.get("async_op"))
        return plain(*args, **kwargs)

    return call


def _tensor_facts(x: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    return (("shape", tuple(x.shape)), ("dtype", str(x.dtype)))


def _reduction(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return (("reduction", str(given["op"]).rpartition(".")[2]),)


# What every member must say alike, by name of the function; what may differ between members is left out.
_GUARDED: dict[str, Callable[[Mapping[str, Any]], tuple[tuple[str, Any], ...]]] = {
    "all_reduce": lambda given: (*_tensor_facts(given["tensor"]), *_reduction(given)),
    "reduce": lambda given: (*_tensor_facts(given["tensor"]), *_reduction(given), ("dst", _peer(given, "dst"))),
    "broadcast": lambda given: (*_tensor_facts(given["tensor"]), ("src", _peer(given, "src"))),
    "all_gather": lambda given: _tensor_facts(given["tensor"]),
    "all_gather_into_tensor": lambda given: _tensor_facts(given["input_tensor"]),
    "reduce_scatter": lambda given: (("dtype", str(given["output"].dtype)), *_reduction(given)),
    "reduce_scatter_tensor": lambda given: (*_tensor_facts(given["output"]), *_reduction(given)),
    "all_to_all": lambda given: (("dtype", str(given["input_tensor_list"][0].dtype)),),
    "all_to_all_single": lambda given: (("dtype", str(given["input"].dtype)),),
    "gather": lambda given: (*_tensor_facts(given["tensor"]), ("dst", _peer(given, "dst"))),
    "scatter": lambda given: (*_tensor_facts(given["tensor"]), ("src", _peer(given, "src"))),
    "all_gather_object": lambda _given: (),
    "broadcast_object_list": lambda given: (("src", _peer(given, "src")),),
    "gather_object": lambda given: (("dst", _peer(given, "dst")),),
    "scatter_object_list": lambda given: (("src", _peer(given, "src")),),
    "barrier": lambda _given: (),
}


def _group(given: Mapping[str, Any]) -> Any:
    group = given.get("group")
    return dist.group.WORLD if group is None else group


def _peer(given: Mapping[str, Any], name: str) -> int:
    """Global rank of the root, which may be given within the group; rank 0 without either."""
    inside = given.get(f"group_{name}")
    return int(given[name] or 0 if inside is None else dist.get_global_rank(_group(given), inside))


def seed_rank() -> None:
    """A fixed seed and the usual default dtype, since the process may have served another run."""
    torch.manual_seed(0)
    if torch.get_default_dtype() is not torch.float32:
        torch.set_default_dtype(torch.float32)


def _by_rank(ranks: Ranks) -> list[int]:
    """Positions in ``ranks`` in the order of a process group's members, that is, of their numbers."""
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def _name_of(ranks: Ranks, build: int) -> str:
    return f"hyper_parallel {'-'.join(map(str, ranks))} {build}"


_NAMING = threading.Lock()  # while PyTorch's way to name a group is ours


@contextmanager
def _named(name: str) -> Iterator[None]:
    """A group that is built inside has this name, by which its members meet.

    PyTorch makes it of the number of groups that this process has, which differs between members of groups that
    overlap: they would wait for each other for ever. It has no public way to say the name.
    """
    with _NAMING:
        usual = distributed_c10d._hash_ranks_to_str  # noqa: SLF001 - as above
        distributed_c10d._hash_ranks_to_str = lambda ranks: name  # noqa: ARG005, SLF001 - as above
        try:
            yield
        finally:
            distributed_c10d._hash_ranks_to_str = usual  # noqa: SLF001 - as above


def _own(shape: Shape, x: torch.Tensor) -> bool:
    return tuple(shape) == tuple(x.shape)


def _check_told(operation: str, own: torch.Tensor, shapes: Sequence[Shape], position: int, count: int) -> None:
    if len(shapes) != count or not _own(shapes[position], own):
        msg = f"{operation} over {count} ranks sends {list(own.shape)} to itself but says {[list(s) for s in shapes]}"
        raise CollectiveMismatchError(msg)

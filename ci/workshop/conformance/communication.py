"""Checks of the facets *identity*, *groups* and *collectives*."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import ArgumentTypeError, CollectiveMismatchError, HandleError, MeshError
from hyper_parallel.transport.base import ReductionError
from workshop.conformance.world import Contract, World, covers, raises

__all__ = ["COLLECTIVES", "GROUPS", "IDENTITY"]

IDENTITY: Contract = []
GROUPS: Contract = []
COLLECTIVES: Contract = []

_REDUCE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / len(parts),
    "max": lambda parts: parts.max(0),
    "min": lambda parts: parts.min(0),
    "prod": lambda parts: parts.prod(0),
}


@covers(IDENTITY, "get_rank", "get_world_size", "get_group_local_rank", "get_global_rank", "get_process_group_ranks",
        "get_backend")  # fmt: skip
def identity(w: World) -> None:
    """Ranks and positions agree, however the group is named; the error for a non-member lists the group's ranks."""
    p, turned = w.platform, (*w.ranks[1:], 0)
    assert 0 <= p.get_rank() < p.get_world_size()
    assert p.get_process_group_ranks(None) == list(w.ranks)
    assert p.get_process_group_ranks(turned) == list(turned)
    assert p.get_group_local_rank(turned) == turned.index(w.rank)
    assert [p.get_global_rank(turned, position) for position in range(w.size)] == list(turned)
    assert p.get_backend(None) == p.get_backend(turned)
    with raises(MeshError, f"rank {w.rank} is not in the group of ranks"):
        p.get_group_local_rank(tuple(rank for rank in w.ranks if rank != w.rank))
    for group in ((), (0.0, 1.0), (w.rank, w.rank), (w.rank, w.size), (w.rank, -1), [True]):
        with raises(MeshError, f"group {group} must name distinct ranks of the world of {w.size}"):
            p.get_process_group_ranks(group)
    with raises(MeshError, f"group_rank {w.size} is outside the group of ranks {list(turned)}"):
        p.get_global_rank(turned, w.size)


@covers(GROUPS, "init_process_group")
def joining(w: World) -> None:
    """Joining an existing world again has no effect; contradicting arguments raise an error that names them."""
    p = w.platform
    p.init_process_group()
    p.init_process_group(world_size=w.size, rank=w.rank)
    with raises(MeshError, f"world_size={w.size}, which world_size={w.size + 1} contradicts"):
        p.init_process_group(world_size=w.size + 1)
    with raises(MeshError, "leave the argument out, or call destroy_process_group() first"):
        p.init_process_group(rank=w.rank + 1)
    if p.get_backend() != "simulated":
        p.init_process_group(p.get_backend())
        with raises(MeshError, "contradicts"):
            p.init_process_group("another")


@covers(GROUPS, "create_group", "_create_group", "get_created_group", "destroy_process_group", "mark_created_groups")
def groups(w: World) -> None:
    """A group of the same ranks is the same object; it is forgotten when destroyed, and known when adopted."""
    p = w.platform
    members = list(w.ranks[:-1])  # not the world, which no handle can destroy
    if w.rank in members:
        handle = p.create_group(members[::-1])
        assert p.create_group(members) is handle
        assert p.get_created_group(members) is handle
        assert p.get_process_group_ranks(handle) == members
        w.same(p.all_reduce(w.tensor(np.ones(2)), handle), np.full(2, len(members)))
        p.destroy_process_group(handle)
        assert p.get_created_group(members) is None
        with raises(MeshError, "is not a group of this world, or was destroyed"):
            p.get_process_group_ranks(handle)
        again = p._create_group(members)  # noqa: SLF001 - a member of the contract
        p.mark_created_groups(again)
        p.mark_created_groups([again])
        assert p.get_created_group(members[::-1]) is again
    p.barrier()
    for wrong in ([0, 0], [0, w.size], [], None, 1, "01", [0.0, 1.0], [True, False]):
        with raises(MeshError, f"rank_list {wrong!r} must name distinct ranks of the world of {w.size}"):
            p.create_group(wrong)  # type: ignore[arg-type] # wrong
    for stranger in (None, "abc", object()):
        with raises(MeshError):
            p.mark_created_groups([stranger])


@covers(GROUPS, "split_group")
def splitting(w: World) -> None:
    """The caller gets its subgroup; lists that are empty, overlap or leave the group are refused."""
    p, parts = w.platform, [[w.size - 1], list(w.ranks[:-1])]
    mine = p.split_group(None, parts)
    assert p.get_process_group_ranks(mine) == parts[0 if w.rank == w.size - 1 else 1]
    assert p.split_group(None, [[rank] for rank in w.ranks if rank != w.rank]) is None
    for wrong in ([], [[0], [0, 1]]):
        with raises(MeshError, "must be disjoint lists of ranks of the group"):
            p.split_group(None, wrong)
    with raises(MeshError, f"[[{w.rank}]] must be disjoint lists of ranks of the group [{(w.rank + 1) % w.size}]"):
        p.split_group(((w.rank + 1) % w.size,), [[w.rank]])


@covers(GROUPS, "barrier")
def barriers(w: World) -> None:
    """A barrier blocks, or is started and waited for once."""
    assert w.platform.barrier() is None
    handle = w.platform.barrier(w.ranks[::-1], async_op=True)
    assert handle.wait() is None
    with raises(HandleError, "this handle was waited for before"):
        handle.wait()


@covers(COLLECTIVES, "all_reduce", "reduce_scatter_tensor")
def reductions(w: World) -> None:
    """Every reduction is right, blocking and asynchronous; a refusal is the same on every rank."""
    p, position = w.platform, w.ranks[::-1].index(w.rank)
    parts = np.stack(w.everyone((2 * w.size, 3)))
    mine = w.tensor(parts[w.rank])
    for op, fold in _REDUCE.items():
        whole = fold(parts)
        rows = np.split(whole, w.size)
        w.same(p.all_reduce(mine, None, op=op), whole, 1e-12)
        w.same(p.reduce_scatter_tensor(mine, w.ranks[::-1], op=op), rows[position], 1e-12)
        output, handle = p.all_reduce(mine, None, True, op=op)
        other, second = p.reduce_scatter_tensor(mine, None, True, op=op)
        w.same(second.wait(), rows[w.rank], 1e-12)
        assert handle.wait() is output
        w.same(output, whole, 1e-12)
        w.same(other, rows[w.rank], 1e-12)
    booleans = w.tensor(parts[w.rank] > 0)
    w.same(p.all_reduce(booleans, op="any"), (parts > 0).any(0))
    w.same(p.all_reduce(booleans, op="all"), (parts > 0).all(0))
    w.same(mine, parts[w.rank])
    for wrong in (np.ones(2), [1.0]):
        with raises(ArgumentTypeError, f"expected a plain tensor of {p.platform_type}, got {type(wrong).__name__}"):
            p.all_reduce(wrong)
    sharded = distribute_tensor(w.tensor(np.ones((w.size, 2))), DeviceMesh(w.device, list(w.ranks)), [Shard(0)])
    with raises(ArgumentTypeError, "all_reduce: expected a plain tensor of ", "; pass its to_local()"):
        p.all_reduce(sharded)
    with raises(ReductionError, "unknown reduction 'median'"):
        p.all_reduce(mine, op="median")
    with raises(ReductionError, "the average of integers or booleans is not an integer"):
        p.all_reduce(w.tensor(np.ones(2, np.int64)), op="avg")
    with raises(
        ValueError, f"reduce_scatter_tensor: dim 0 of size {2 * w.size + 1} is not divisible by {w.size} ranks"
    ):
        p.reduce_scatter_tensor(w.tensor(np.ones((2 * w.size + 1, 2))))


@covers(COLLECTIVES, "all_gather_into_tensor", "broadcast", "all_to_all_single")
def movements(w: World) -> None:
    """Values of every dtype arrive unchanged, blocking and asynchronous; a handle is waited for once."""
    p = w.platform
    for dtype in ("float64", "int64", "bool"):
        parts = w.everyone((w.size, 2), dtype=dtype)
        mine = w.tensor(parts[w.rank])
        gathered, source = np.concatenate(parts), w.size - 1
        turned = np.stack([part[w.rank] for part in parts])
        w.same(p.all_gather_into_tensor(mine), gathered)
        w.same(p.broadcast(mine, source), parts[source])
        exchanged, nothing = p.all_to_all_single(mine, (2 * w.size,))
        assert nothing is None
        w.same(exchanged, turned.reshape(-1))
        flights = [p.all_gather_into_tensor(mine, None, True), p.broadcast(mine, source, None, True),
                   p.all_to_all_single(mine, (w.size, 2), None, True)]  # fmt: skip
        for (output, handle), want in zip(flights[::-1], (turned, parts[source], gathered), strict=True):
            assert handle.wait() is output
            w.same(output, want)
            with raises(HandleError, "this handle was waited for before; wait once and keep the result"):
                handle.wait()
    with raises(ValueError, "all_to_all_single: dim 0 of size"):
        p.all_to_all_single(w.tensor(np.ones((w.size + 1, 2))), (2,))
    with raises(ValueError, f"cannot be reshaped to [-1, {-2 * w.size}]"):
        p.all_to_all_single(w.tensor(np.ones((w.size, 2))), (-1, -2 * w.size))
    with raises(ValueError, "a 0-d tensor cannot be concatenated; reshape it to (1,)"):
        p.all_gather_into_tensor(w.tensor(np.array(1.0)))
    with raises(ValueError, "cannot be reshaped to [7, 7]"):
        p.all_to_all_single(w.tensor(np.ones((w.size, 2))), (7, 7))
    stranger = ((w.rank + 1) % w.size,)
    with raises(CollectiveMismatchError, "of which it is not a member"):
        p.all_gather_into_tensor(w.tensor(np.ones(2)), stranger)


@covers(COLLECTIVES, "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single",
        "isend", "irecv")  # fmt: skip
def in_flight(w: World) -> None:
    """Starting a collective returns while another member has not joined it; waiting for it returns the result once."""
    p, last, parts = w.platform, w.size - 1, np.stack(w.everyone((w.size, 2)))
    mine = w.tensor(parts[w.rank])
    started: list[tuple[Callable[[], Any], Any]] = [
        (lambda: p.all_reduce(mine, None, True), parts.sum(0)),
        (lambda: p.all_gather_into_tensor(mine, None, True), np.concatenate(parts)),
        (lambda: p.reduce_scatter_tensor(mine, None, True), parts.sum(0)[w.rank : w.rank + 1]),
        (lambda: p.broadcast(mine, last, None, True), parts[last]),  # its source is the rank that joins late
        (lambda: p.all_to_all_single(mine, (w.size, 2), None, True), parts[:, w.rank]),
        (lambda: (None, p.barrier(None, True)), None),
    ]
    for number, (start, want) in enumerate(started):
        if w.rank == last:  # joins after a message of rank 0, which has continued
            w.same(p.irecv(w.tensor(np.zeros(1)), 0).wait(), np.full(1, number))
        output, handle = start()
        if w.rank == 0:
            assert not handle.waited
            p.isend(w.tensor(np.full(1, float(number))), last).wait()
        assert handle.wait() is output
        assert handle.waited
        if output is not None:
            w.same(output, want)
        with raises(HandleError, "this handle was waited for before; wait once and keep the result"):
            handle.wait()
    if w.rank == last:  # a posted receive without a message does not block either
        buffer = w.tensor(np.zeros(2))
        receive = p.irecv(buffer, 0)
        p.isend(w.tensor(np.ones(1)), 0).wait()
        assert receive.wait() is buffer
        w.same(buffer, np.full(2, 5.0))
    elif w.rank == 0:
        p.irecv(w.tensor(np.zeros(1)), last).wait()
        p.isend(w.tensor(np.full(2, 5.0)), last).wait()


@covers(COLLECTIVES, "isend", "irecv")
def messages(w: World) -> None:
    """Two messages to the next rank arrive in order, waited for in the other order; ranks outside are refused."""
    p, after, before = w.platform, (w.rank + 1) % w.size, (w.rank - 1) % w.size
    buffers = [w.tensor(np.zeros((2, 3))) for _ in range(2)]
    posted = [p.irecv(buffer, before, tag=1) for buffer in buffers]
    sent = [p.isend(w.tensor(w.sample((2, 3), turn=turn)), after, tag=1) for turn in range(2)]
    assert posted[1].wait() is buffers[1]
    posted[0].wait()
    for turn in range(2):
        sent[turn].wait()
        w.same(buffers[turn], w.sample((2, 3), before, turn))
    with raises(HandleError, "recv: this handle was waited for before"):
        posted[0].wait()
    if w.rank == 0 and w.survives_mismatch:  # a buffer longer than the message would have garbage at its end
        p.isend(w.tensor(np.ones(2)), 1).wait()
        p.isend(w.tensor(np.ones((0, 2))), 1).wait()
    elif w.rank == 1 and w.survives_mismatch:
        for sent_text in ("f64[2]", "f64[0, 2]"):
            with raises(CollectiveMismatchError, sent_text, "f64[3]"):
                p.irecv(w.tensor(np.zeros(3)), 0).wait()
    for member in (p.isend, p.irecv):
        with raises(CollectiveMismatchError, "must be another rank of the group"):
            member(buffers[0], w.rank)
        with raises(CollectiveMismatchError, f"rank {after} must be another rank of the group [{w.rank}]"):
            member(buffers[0], after, (w.rank,))


@covers(COLLECTIVES, "all_gather_object", "send_object_list", "recv_object_list")
def objects(w: World) -> None:
    """Picklable objects arrive equal; a list of another length is refused."""
    p, gathered = w.platform, [None]
    p.all_gather_object(gathered, {"rank": w.rank})
    assert gathered == [{"rank": rank} for rank in w.ranks]
    if w.rank == 0:
        p.send_object_list([1, "two", {3: 4}], 1)
        p.send_object_list([1], 1)
    elif w.rank == 1:
        room = [None] * 3
        assert p.recv_object_list(room, 0) == 0
        assert room == [1, "two", {3: 4}]
        with raises(CollectiveMismatchError, "rank 0 sent 1 objects, obj_list has room for 3"):
            p.recv_object_list(room, 0)


@covers(COLLECTIVES, "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single")
def disagreements(w: World) -> None:
    """Unequal shapes, dtypes and reductions raise on every rank, with each rank's call; nothing hangs."""
    p, first = w.platform, w.rank == 0
    uneven = w.tensor(np.ones(2 if first else 3))
    for member in (p.all_reduce, p.all_gather_into_tensor, partial(p.broadcast, src=0)):
        with raises(CollectiveMismatchError, "f64"):
            member(uneven)
    with raises(CollectiveMismatchError, "f32[2]", "f64[2]"):
        p.all_reduce(w.tensor(np.ones(2, np.float32 if first else np.float64)))
    with raises(CollectiveMismatchError, "sum", "max"):
        p.all_reduce(w.tensor(np.ones(2)), op="sum" if first else "max")
    if w.survives_mismatch:
        _asynchronous_mismatches(w)
    p.barrier()


def _asynchronous_mismatches(w: World) -> None:
    """Asynchronous mismatches raise in wait, whichever rank has the larger tensor; the next collective is right."""
    p = w.platform
    members: list[Callable[[Any], Any]] = [
        lambda x: p.all_reduce(x, None, True),
        lambda x: p.all_gather_into_tensor(x, None, True),
        lambda x: p.reduce_scatter_tensor(x, None, True),
        lambda x: p.broadcast(x, 0, None, True),
        lambda x: p.all_to_all_single(x, tuple(x.shape), None, True),
    ]
    for larger in (0, w.size - 1):
        size = w.size * (5000 if w.rank == larger else 3)
        for member in members:
            with raises(CollectiveMismatchError, "f64"):
                member(w.tensor(np.ones(size)))[1].wait()
            output, handle = p.all_reduce(w.tensor(w.sample((3,))), None, True)
            handle.wait()
            w.same(output, np.sum(w.everyone((3,)), 0))
    with raises(CollectiveMismatchError, "f32[2]", "f64[2]"):
        p.all_reduce(w.tensor(np.ones(2, np.float32 if w.rank == 0 else np.float64)), None, True)[1].wait()
    with raises(CollectiveMismatchError, "sum", "max"):
        p.all_reduce(w.tensor(np.ones(2)), None, True, op="sum" if w.rank == 0 else "max")[1].wait()

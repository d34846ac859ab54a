"""The operators that ``mint.distributed``, ``ops.communication`` and ``communication.comm_func`` call.

MindSpore's own functions check their arguments and call one of these operators. ``DistComm*`` writes into tensors and
has no gradient; ``InnerComm*`` returns new tensors and has the gradient of the primitive with the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.ops.auto_generate import gen_ops_prim as generated
from mindspore.ops.operations import comm_ops

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.frontends.mindspore_comm import collectives
from hyper_parallel.transport.frontends.mindspore_comm.collectives import Array
from hyper_parallel.transport.frontends.mindspore_comm.host import (
    empty,
    from_host,
    host_dtype,
    overwrite,
    to_host,
    write,
)
from hyper_parallel.transport.frontends.mindspore_comm.primitives import carry, carry_later
from hyper_parallel.transport.frontends.mindspore_comm.world import Group, World, current_world
from hyper_parallel.transport.work import Work

__all__ = ["OPERATORS", "Handle"]


class Handle:
    """The handle that MindSpore wraps in a ``CommHandle``; repeated waits are allowed."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish

    def wait(self) -> None:
        """Wait for the other members, and write the outputs."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def get_comm_handle_ptr_str(self) -> str:
        """Return a text for MindSpore's ``repr``."""
        return hex(id(self))


# -- into tensors ------------------------------------------------------------------------------------------------------


def _into(work: Work, outputs: Sequence[Tensor], operation: str, *, waits: bool) -> tuple[Tensor, Handle]:
    """When the work is complete, write its result (an array or a list of arrays) into ``outputs``; None is skipped."""

    def finish() -> None:
        arrived = work.wait()
        arrays = arrived if isinstance(arrived, list) else [arrived]
        for output, array in zip(outputs, arrays, strict=False):
            if array is not None:
                _fit(output, array, operation)
                write(output, array.reshape(output.shape), operation)

    handle = Handle(finish)
    if waits:
        handle.wait()
    return (outputs[0] if outputs else Tensor(0.0)), handle


def _fit(output: Tensor, array: Array, operation: str) -> None:
    if output.size != array.size or host_dtype(output.dtype) != array.dtype:
        msg = (
            f"{operation} yields {array.dtype}{list(array.shape)}, which does not match the output "
            f"{host_dtype(output.dtype)}{list(output.shape)}"
        )
        raise CollectiveMismatchError(msg)


def _here(name: str) -> tuple[World, Group]:
    world = current_world()
    return world, world.group_of_member(name)


def _member(group: Group, rank: int, operation: str) -> int:
    """Return a global rank, after checking that it is a member."""
    if rank not in group.ranks:
        msg = f"{operation} names rank {rank}, which is not a member of {group}"
        raise CollectiveMismatchError(msg)
    return rank


def _all_reduce(x: Tensor, op: str, group: str, later: bool = True) -> Any:
    work = collectives.all_reduce(*_here(group), to_host(x), op)
    return _into(work, [x], "all_reduce", waits=not later)


def _reduce(x: Tensor, op: str, root: int, group: str, later: bool = True) -> Any:
    world, named = _here(group)
    work = collectives.reduce(world, named, to_host(x), op, _member(named, root, "reduce"))
    return _into(work, [x], "reduce", waits=not later)


def _broadcast(x: Tensor, root: int, position: int, group: str, later: bool = True) -> Any:
    del position
    world, named = _here(group)
    work = collectives.broadcast(world, named, to_host(x), named.ranks[root])
    return _into(work, [x], "broadcast", waits=not later)


def _all_gather(outputs: Sequence[Tensor], x: Tensor, size: int, group: str, later: bool = True) -> Any:
    del size
    work = collectives.all_gather(*_here(group), to_host(x), [tuple(output.shape) for output in outputs])
    return _into(work, outputs, "all_gather", waits=not later)


def _all_gather_into(output: Tensor, x: Tensor, size: int, group: str, later: bool = True) -> Any:
    del size
    work = collectives.all_gather(*_here(group), to_host(x))
    joined = work.then(lambda parts: np.concatenate([part.reshape(-1) for part in parts]))
    return _into(joined, [output], "all_gather_into_tensor", waits=not later)


def _all_gather_uneven(
    output: Tensor, x: Tensor, sizes: Sequence[int], size: int, group: str, later: bool = True
) -> Any:
    del size
    world, named = _here(group)
    rows = _row_counts(output, sizes, named, "all_gather_into_tensor_uneven")
    here = rows[named.ranks.index(world.rank)]
    if x.shape[0] != here:
        msg = (
            f"all_gather_into_tensor_uneven: output_split_sizes {rows} give this rank {here} rows; it has {x.shape[0]}"
        )
        raise CollectiveMismatchError(msg)
    work = collectives.all_gather(world, named, to_host(x), [(count, *x.shape[1:]) for count in rows])
    return _into(work.then(np.concatenate), [output], "all_gather_into_tensor_uneven", waits=not later)


def _row_counts(whole: Tensor, sizes: Sequence[int], group: Group, operation: str) -> list[int]:
    """Return each member's number of rows in ``whole``: ``sizes``, or equal numbers."""
    count = len(group.ranks)
    rows = list(sizes) or [whole.shape[0] // count] * count
    if len(rows) != count or sum(rows) != whole.shape[0]:
        shape = list(whole.shape)
        msg = f"{operation} in {group}: rows {rows} must be {count} numbers whose sum is the first dim of {shape}"
        raise CollectiveMismatchError(msg)
    return rows


def _reduce_scatter(
    output: Tensor, inputs: Sequence[Tensor], size: int, op: str, group: str, later: bool = True
) -> Any:
    del size
    work = collectives.reduce_scatter(*_here(group), [to_host(x) for x in inputs], op)
    return _into(work, [output], "reduce_scatter", waits=not later)


def _reduce_scatter_into(output: Tensor, x: Tensor, size: int, op: str, group: str, later: bool = True) -> Any:
    return _reduce_scatter_uneven(output, x, [], size, op, group, later)


def _reduce_scatter_uneven(
    output: Tensor, x: Tensor, sizes: Sequence[int], size: int, op: str, group: str, later: bool = True
) -> Any:
    del size
    world, named = _here(group)
    rows = _row_counts(x, sizes, named, "reduce_scatter_tensor")
    chunks = np.split(to_host(x), np.cumsum(rows)[:-1])
    work = collectives.reduce_scatter(world, named, chunks, op)
    return _into(work, [output], "reduce_scatter_tensor", waits=not later)


def _gather(
    x: Tensor, outputs: Sequence[Tensor], size: int, root: int, position: int, group: str, later: bool = True
) -> Any:
    del size, position
    world, named = _here(group)
    work = collectives.gather(world, named, to_host(x), named.ranks[root])
    return _into(work, outputs, "gather", waits=not later)


def _gather_into(output: Tensor, x: Tensor, size: int, root: int, position: int, group: str, later: bool = True) -> Any:
    del size, position
    world, named = _here(group)
    work = collectives.gather(world, named, to_host(x), named.ranks[root])
    joined = work.then(lambda parts: None if parts is None else np.concatenate(parts))
    return _into(joined, [output], "gather_into_tensor", waits=not later)


def _scatter(
    output: Tensor, inputs: Sequence[Tensor], size: int, root: int, position: int, group: str, later: bool = True
) -> Any:
    del size, position
    world, named = _here(group)
    work = collectives.scatter(world, named, [to_host(x) for x in inputs], to_host(output), named.ranks[root])
    return _into(work, [output], "scatter", waits=not later)


def _scatter_from(
    output: Tensor, x: Tensor, size: int, root: int, position: int, group: str, later: bool = True
) -> Any:
    del position
    world, named = _here(group)
    chunks = np.split(to_host(x), size) if world.rank == named.ranks[root] else []
    work = collectives.scatter(world, named, chunks, to_host(output), named.ranks[root])
    return _into(work, [output], "scatter_tensor", waits=not later)


def _all_to_all(
    outputs: Any, x: Tensor, group: str, sends: Sequence[int], expects: Sequence[int], size: int, later: bool = True
) -> Any:
    del size
    work = collectives.all_to_all(*_here(group), _chunks(x, sends), expects)
    return _into(work, outputs, "all_to_all", waits=not later)


def _all_to_all_single(
    output: Tensor,
    x: Tensor,
    group: str,
    sends: Sequence[int],
    expects: Sequence[int],
    size: int,
    even: bool = False,
    later: bool = True,
) -> Any:
    del size, even
    work = collectives.all_to_all(*_here(group), _chunks(x, sends), expects)
    return _into(work.then(np.concatenate), [output], "all_to_all_single", waits=not later)


def _all_to_all_v_c(
    output: Tensor, x: Tensor, group: str, matrix: Sequence[int], size: int, position: int, later: bool = True
) -> Any:
    counts = np.array(matrix).reshape(size, size)
    sends, expects = counts[position].tolist(), counts[:, position].tolist()
    return _all_to_all_single(output, x, group, sends, expects, size, later=later)


def _chunks(x: Tensor, counts: Sequence[int]) -> list[Array]:
    flat = to_host(x).reshape(-1)
    if sum(counts) != flat.size:
        msg = f"all_to_all sends chunks of {list(counts)} elements from a tensor of {flat.size}"
        raise CollectiveMismatchError(msg)
    return np.split(flat, np.cumsum(list(counts))[:-1])


def _barrier(group: str, later: bool = True) -> Any:
    return _into(collectives.barrier(*_here(group)), [], "barrier", waits=not later)


# -- messages ----------------------------------------------------------------------------------------------------------


def _isend(x: Tensor, peer: int, group: str, tag: int) -> Any:
    world, named = _here(group)
    collectives.send(world, named, to_host(x), named.ranks[peer], tag)
    return x, Handle(lambda: None)


def _irecv_into(output: Tensor, tag: int, peer: int, group: str) -> Any:
    world, named = _here(group)
    work = collectives.recv(world, named, to_host(output), named.ranks[peer], tag)
    return _into(work, [output], "irecv", waits=False)


def _irecv(tag: int, peer: int, shape: Sequence[int], group: str, dtype: Any) -> Any:
    world, named = _here(group)
    like = empty(tuple(shape), host_dtype(dtype))
    work = collectives.recv(world, named, like, named.ranks[peer], tag)
    output = from_host(like)
    return output, Handle(lambda: overwrite(output, work.wait()))


def _batch(tensors: Sequence[Tensor], group: str, kinds: Sequence[int], peers: Sequence[int]) -> Any:
    """Run a batch of messages; ``kinds`` are 0 for send and 1 for receive."""
    started = [
        _irecv_into(tensor, 0, peer, group) if kind else _isend(tensor, peer, group, 0)
        for tensor, kind, peer in zip(tensors, kinds, peers, strict=True)
    ]

    def finish() -> None:
        for _, handle in started:
            handle.wait()

    return tensors[0], Handle(finish)


# -- new tensors, with gradients ---------------------------------------------------------------------------------------


def _new(primitive: Any, later: bool, *inputs: Any) -> Any:
    """Call a primitive, or start it if ``later`` is True."""
    if not later:
        return carry(primitive, *inputs)
    outputs, finish = carry_later(primitive, *inputs)
    return outputs, Handle(finish)


def _new_all_reduce(x: Tensor, op: str, group: str, later: bool = True) -> Any:
    return _new(comm_ops.AllReduce(op, group), later, x)


def _new_all_gather(x: Tensor, size: int, group: str, later: bool = True) -> Any:
    del size
    return _new(comm_ops.AllGather(group), later, x)


def _new_reduce_scatter(x: Tensor, size: int, op: str, group: str, later: bool = True) -> Any:
    del size
    return _new(comm_ops.ReduceScatter(op, group), later, x)


def _new_all_to_all(
    x: Tensor, group: str, sends: Any, expects: Any, size: int, even: bool = False, later: bool = True
) -> Any:
    del size, even
    return _new(comm_ops.AlltoAllV(group), later, x, tuple(sends), tuple(expects))


OPERATORS: dict[type, Callable[..., Any]] = {
    generated.DistCommAllReduce: _all_reduce,
    generated.DistCommReduce: _reduce,
    generated.DistCommBroadcast: _broadcast,
    generated.DistCommAllGather: _all_gather,
    generated.DistCommAllGatherIntoTensor: _all_gather_into,
    generated.DistCommAllGatherIntoTensorUneven: _all_gather_uneven,
    generated.DistCommReduceScatter: _reduce_scatter,
    generated.DistCommReduceScatterTensor: _reduce_scatter_into,
    generated.DistCommReduceScatterTensorUneven: _reduce_scatter_uneven,
    generated.DistCommGather: _gather,
    generated.DistCommGatherIntoTensor: _gather_into,
    generated.DistCommScatter: _scatter,
    generated.DistCommScatterTensor: _scatter_from,
    generated.DistCommAllToAllV: _all_to_all,
    generated.DistCommAllToAllVSingle: _all_to_all_single,
    generated.DistCommAllToAllVC: _all_to_all_v_c,
    generated.DistCommBarrier: _barrier,
    generated.DistCommIsend: _isend,
    generated.DistCommIrecv: _irecv_into,
    generated.DistCommBatchIsendIrecv: _batch,
    generated.InnerCommAllReduce: _new_all_reduce,
    generated.InnerCommAllGather: _new_all_gather,
    generated.InnerCommReduceScatter: _new_reduce_scatter,
    generated.InnerCommAllToAllV: _new_all_to_all,
    generated.InnerCommIsend: _isend,
    generated.InnerCommIrecv: _irecv,
}
"""Functions that run an operator, by operator."""

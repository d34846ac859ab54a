"""The communication primitives of ``mindspore.ops`` on the current world, with MindSpore's gradients.

A call of a primitive runs :func:`carry`. Its gradient is MindSpore's own definition (``grad_comm_ops``), executed in
Python; the primitives that it calls are handled here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.operations import comm_ops

from hyper_parallel.errors import CollectiveMismatchError, UnsupportedOnBackend
from hyper_parallel.platform.mindspore.versions import Function, get_bprop_fn, grad_comm_ops
from hyper_parallel.transport.frontends.mindspore_comm import collectives
from hyper_parallel.transport.frontends.mindspore_comm.collectives import Array
from hyper_parallel.transport.frontends.mindspore_comm.host import (
    empty,
    from_host,
    host_dtype,
    on_accelerator,
    overwrite,
    to_host,
)
from hyper_parallel.transport.frontends.mindspore_comm.world import Group, World, current_world
from hyper_parallel.transport.work import Work

if TYPE_CHECKING:
    from mindspore.ops.primitive import Primitive

__all__ = ["CARRIED", "REFUSED", "Started", "carry", "carry_later"]

assert grad_comm_ops  # noqa: S101 - imported because it registers the gradients


@dataclass(frozen=True)
class Started:
    """A primitive in flight.

    Attributes:
        outputs: arrays that :meth:`finish` fills.
        finish: waits for the other members.
        single: whether the primitive returns a tensor, not a tuple.
    """

    outputs: tuple[Array, ...]
    finish: Callable[[], None]
    single: bool = True

    def tensors(self) -> Any:
        """The outputs as tensors, which on CPU share the arrays' memory."""
        tensors = tuple(from_host(output) for output in self.outputs)
        return tensors[0] if self.single else tensors


def carry(primitive: Primitive, *inputs: Any) -> Any:
    """Call a primitive and return its outputs, which are differentiable if MindSpore defines a gradient.

    Raises:
        CollectiveMismatchError: this rank is not a member of the group, or the arguments are invalid.
        MeshError: the group does not exist.
    """
    outputs, finish = carry_later(primitive, *inputs)
    finish()
    return outputs


def carry_later(primitive: Primitive, *inputs: Any) -> tuple[Any, Callable[[], None]]:
    """Start a primitive; return its outputs, and a function that waits for the other members and fills them."""
    call = _Call(primitive, inputs)
    outputs = _Carried.apply(call, *call.tensors)
    return outputs, call.finish


class _Call:
    """A call of a primitive; it is passed to the gradient engine as one argument, with its tensors."""

    def __init__(self, primitive: Primitive, inputs: tuple[Any, ...]) -> None:
        self.primitive = primitive
        # MindSpore's gradients require sizes as tuples.
        self.inputs = tuple(tuple(value) if isinstance(value, list) else value for value in inputs)
        self.tensors = tuple(_leaves(inputs))
        self.outputs: Any = None
        self.finish: Callable[[], None] = _nothing

    def start(self) -> Any:
        """Start the call and return its outputs."""
        world = current_world()
        primitive = self.primitive
        name = primitive.get_attr_dict().get("group", getattr(primitive, "group", None))
        started = CARRIED[type(primitive)](world, world.group_of_member(str(name)), primitive, self.inputs)
        self.outputs = started.tensors()
        self.finish = partial(self._finish_on_accelerator, started) if on_accelerator() else started.finish
        return self.outputs

    def _finish_on_accelerator(self, started: Started) -> None:
        """Wait, and copy the arrays to the device."""
        started.finish()
        outputs = self.outputs if isinstance(self.outputs, tuple) else (self.outputs,)
        for output, array in zip(outputs, started.outputs, strict=True):
            if array.size:
                overwrite(output, array)


class _Carried(Function):
    """Runs a call, and in backward MindSpore's gradient of its primitive."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        """Return the outputs of the primitive."""
        del tensors
        ctx.call = call
        return call.start()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return None for the call, and a gradient for each tensor."""
        call: _Call = ctx.call
        primitive = call.primitive
        bprop = None if type(primitive) in _FROM_MEMBERS_WITHOUT else get_bprop_fn(primitive)
        if bprop is None:
            msg = (
                f"ops.{primitive.name} has no gradient on MindSpore that could run; stop the gradient before it, or "
                "use a primitive whose output every member has"
            )
            raise UnsupportedOnBackend(msg)
        outputs = call.outputs if isinstance(call.outputs, tuple) else (call.outputs,)
        filled = tuple(
            ops.zeros_like(output) if cotangent is None else cotangent
            for output, cotangent in zip(outputs, cotangents, strict=True)
        )
        gradients = bprop(*call.inputs, call.outputs, filled if isinstance(call.outputs, tuple) else filled[0])
        return None, *_gradients(call, gradients)


def _gradients(call: _Call, gradients: Sequence[Any]) -> list[Tensor]:
    """Return one gradient per tensor of the call; placeholders of different shapes, as of Receive, become zero."""
    flat = [
        leaf
        for value, gradient in zip(call.inputs, gradients, strict=True)
        if any(True for _ in _leaves((value,)))
        for leaf in _leaves((gradient,))
    ]
    return [
        gradient if gradient.shape == tensor.shape else ops.zeros_like(tensor)
        for tensor, gradient in zip(call.tensors, flat, strict=True)
    ]


def _leaves(values: Sequence[Any]) -> list[Tensor]:
    """Yield the tensors among arguments, including those in tuples and lists."""
    leaves: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            leaves.append(value)
        elif isinstance(value, (tuple, list)):
            leaves.extend(_leaves(value))
    return leaves


# -- results -----------------------------------------------------------------------------------------------------------


def _single(work: Work, shape: Sequence[int], like: Array) -> Started:
    """Handle a primitive with one output of the shape, into which the work's array is written."""
    output = empty(tuple(shape), like.dtype)

    def finish() -> None:
        arrived = work.wait()
        if arrived is not None:
            np.copyto(output, np.reshape(arrived, output.shape))

    return Started((output,), finish)


def _joined(work: Work, shape: Sequence[int], like: Array, dim: int = 0) -> Started:
    """Handle a primitive whose output is the concatenation of the work's arrays."""
    return _single(work.then(lambda parts: None if parts is None else np.concatenate(parts, dim)), shape, like)


def _rows(primitive: Primitive, group: Group, x: Array) -> list[Array]:
    """Split ``x`` into equal chunks along its first dim, one per member."""
    count = len(group.ranks)
    if not x.ndim or x.shape[0] % count:
        msg = (
            f"ops.{primitive.name} splits the first dim of {list(x.shape)} over {group}: it must be a multiple of "
            f"{count}"
        )
        raise CollectiveMismatchError(msg)
    return np.split(x, count)


def _counts(sizes: Any, unit: int = 1) -> list[int]:
    """Return sizes that are given as a list or a tensor."""
    values = sizes.asnumpy().reshape(-1).tolist() if isinstance(sizes, Tensor) else list(sizes)
    return [int(value) * unit for value in values]


def _cut(primitive: Primitive, x: Array, counts: Sequence[int]) -> list[Array]:
    """Split flat ``x`` into chunks of these sizes."""
    if sum(counts) != x.size:
        msg = f"ops.{primitive.name} sends chunks of {list(counts)} elements from a tensor of {x.size}"
        raise CollectiveMismatchError(msg)
    return np.split(x.reshape(-1), np.cumsum(counts)[:-1])


def _member(primitive: Primitive, group: Group, position: int) -> int:
    """Return the global rank of a group rank in an argument."""
    if not 0 <= position < len(group.ranks):
        msg = f"ops.{primitive.name} names rank {position} of {group}; its ranks are 0..{len(group.ranks) - 1}"
        raise CollectiveMismatchError(msg)
    return group.ranks[position]


# -- the primitives ----------------------------------------------------------------------------------------------------


def _all_reduce(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    return _single(collectives.all_reduce(world, group, x, primitive.op), x.shape, x)


def _all_gather(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    if not x.ndim:
        msg = f"ops.{primitive.name} gathers along the first dim, which a 0-d tensor does not have"
        raise CollectiveMismatchError(msg)
    work = collectives.all_gather(world, group, x)
    return _joined(work, (x.shape[0] * len(group.ranks), *x.shape[1:]), x)


def _reduce_scatter(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    rows = _rows(primitive, group, to_host(inputs[0]))
    return _single(collectives.reduce_scatter(world, group, rows, primitive.op), rows[0].shape, rows[0])


def _broadcast(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    root = _member(primitive, group, primitive.get_attr_dict()["root_rank"])
    values = inputs[0] if isinstance(inputs[0], (tuple, list)) else inputs
    started = [
        _single(collectives.broadcast(world, group, x, root), x.shape, x) for x in (to_host(value) for value in values)
    ]
    return _together(started)


def _together(started: Sequence[Started]) -> Started:
    """Combine several primitives into one with several outputs."""

    def finish() -> None:
        for each in started:
            each.finish()

    return Started(tuple(output for each in started for output in each.outputs), finish, single=False)


def _reduce(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    root = _member(primitive, group, primitive.dest_rank)
    work = collectives.reduce(world, group, x, primitive.op, root)
    return _single(work, x.shape if world.rank == root else (1,), x)


def _collective_gather(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    root = _member(primitive, group, primitive.dest_rank)
    shape = (x.shape[0] * len(group.ranks), *x.shape[1:]) if world.rank == root else (1,)
    return _joined(collectives.gather(world, group, x, root), shape, x)


def _collective_scatter(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    rows = _rows(primitive, group, to_host(inputs[0]))
    root = _member(primitive, group, primitive.src_rank)
    return _single(collectives.scatter(world, group, rows, rows[0], root), rows[0].shape, rows[0])


def _all_to_all(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    count = len(group.ranks)
    split, joined = (dim % x.ndim for dim in (primitive.split_dim, primitive.concat_dim))
    if primitive.split_count != count or x.shape[split] % count:
        msg = (
            f"ops.AlltoAll splits dim {split} of {list(x.shape)} in {primitive.split_count} for {group}: split_count "
            f"must be its size, and the dim a multiple of it"
        )
        raise CollectiveMismatchError(msg)
    chunks = np.split(x, count, split)
    shape = list(chunks[0].shape)
    work = collectives.all_to_all(world, group, [chunk.reshape(-1) for chunk in chunks], [chunks[0].size] * count)
    parts = work.then(lambda arrived: [part.reshape(shape) for part in arrived])
    return _joined(parts, [size * count if dim == joined else size for dim, size in enumerate(shape)], x, joined)


def _all_to_all_v(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    sends, expects = (_counts(sizes, primitive.block_size) for sizes in inputs[1:3])
    return _joined(collectives.all_to_all(world, group, _cut(primitive, x, sends), expects), (sum(expects),), x)


def _all_to_all_v_c(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    count, here = len(group.ranks), group.ranks.index(world.rank)
    matrix = np.array(_counts(inputs[1], primitive.block_size))
    if matrix.size != count * count:
        msg = f"ops.AlltoAllVC in {group} takes a matrix of {count} x {count} counts; it has {matrix.size}"
        raise CollectiveMismatchError(msg)
    matrix = matrix.reshape(count, count)
    matrix = matrix.T if primitive.transpose else matrix
    sends, expects = matrix[here].tolist(), matrix[:, here].tolist()
    return _joined(collectives.all_to_all(world, group, _cut(primitive, x, sends), expects), (sum(expects),), x)


def _all_gather_v(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0]).reshape(-1)
    sizes = _counts(inputs[1])
    here = group.ranks.index(world.rank)
    if len(sizes) != len(group.ranks) or sizes[here] != x.size:
        msg = f"ops.{primitive.name} in {group}: output_split_sizes {sizes} do not have this rank's {x.size} elements"
        raise CollectiveMismatchError(msg)
    work = collectives.all_gather(world, group, x, [(size,) for size in sizes])
    return _joined(work, (sum(sizes),), x)


def _reduce_scatter_v(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    sizes = _counts(inputs[1])
    work = collectives.reduce_scatter(world, group, _cut(primitive, x, sizes), primitive.op)
    return _single(work, (sizes[group.ranks.index(world.rank)],), x)


def _barrier(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    del primitive, inputs
    return _single(collectives.barrier(world, group), (1,), np.zeros(1, np.float32))


def _send(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    x = to_host(inputs[0])
    primitive.add_prim_attr("shape", tuple(inputs[0].shape))  # MindSpore's gradient reads both attributes
    primitive.add_prim_attr("dtype", inputs[0].dtype)
    collectives.send(world, group, x, _member(primitive, group, primitive.rank), primitive.sr_tag)
    return Started((np.array(x),), _nothing)


def _receive(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    del inputs
    like = empty(tuple(primitive.shape), host_dtype(primitive.dtype))
    work = collectives.recv(world, group, like, _member(primitive, group, primitive.rank), primitive.tag)
    return _single(work, like.shape, like)


def _batch(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    attributes = primitive.get_attr_dict()
    sent = iter(_leaves(inputs))
    kinds = zip(attributes["receive_shapes"], attributes["receive_dtypes"], strict=True)
    started = []
    for kind, position in zip(attributes["op_types"], attributes["remote_ranks"], strict=True):
        peer = _member(primitive, group, position)
        if kind == "isend":
            collectives.send(world, group, to_host(next(sent)), peer, 0)
            started.append(Started((np.zeros((), np.float32),), _nothing))
        else:
            shape, dtype = next(kinds)
            like = empty(tuple(shape), host_dtype(dtype))
            started.append(_single(collectives.recv(world, group, like, peer, 0), like.shape, like))
    return _together(started)


def _neighbor_exchange(world: World, group: Group, primitive: Any, inputs: Any) -> Started:
    dtype = host_dtype(primitive.recv_type)
    for x, position, shape in zip(_leaves(inputs), primitive.send_rank_ids, primitive.send_shapes, strict=True):
        if math.prod(shape) != x.size:
            msg = f"ops.NeighborExchange sends a tensor of {list(x.shape)}, but its send_shapes name {list(shape)}"
            raise CollectiveMismatchError(msg)
        collectives.send(world, group, to_host(x), _member(primitive, group, position), 0)
    likes = [empty(tuple(shape), dtype) for shape in primitive.recv_shapes]
    return _together(
        [
            _single(collectives.recv(world, group, like, _member(primitive, group, position), 0), like.shape, like)
            for like, position in zip(likes, primitive.recv_rank_ids, strict=True)
        ]
    )


def _nothing() -> None:
    """Do nothing: the message is already sent."""


CARRIED: dict[type, Callable[[World, Group, Any, Any], Started]] = {
    comm_ops.AllReduce: _all_reduce,
    comm_ops.AllGather: _all_gather,
    comm_ops.ReduceScatter: _reduce_scatter,
    comm_ops.Broadcast: _broadcast,
    comm_ops.Reduce: _reduce,
    comm_ops.CollectiveGather: _collective_gather,
    comm_ops.CollectiveScatter: _collective_scatter,
    comm_ops.AlltoAll: _all_to_all,
    comm_ops.AlltoAllV: _all_to_all_v,
    comm_ops.AlltoAllVC: _all_to_all_v_c,
    comm_ops.AllGatherV: _all_gather_v,
    comm_ops.ReduceScatterV: _reduce_scatter_v,
    comm_ops.Barrier: _barrier,
    comm_ops.Send: _send,
    comm_ops.Receive: _receive,
    comm_ops.BatchISendIRecv: _batch,
    comm_ops.NeighborExchange: _neighbor_exchange,
}
"""Functions that start a primitive, by primitive."""

# Their gradient broadcasts the root's cotangent to members whose output, and therefore cotangent, has shape [1].
_FROM_MEMBERS_WITHOUT = (comm_ops.Reduce, comm_ops.CollectiveGather)
_COMPILED = "it is made by MindSpore's graph compiler, which does not run on simulated ranks"
_REFUSED = {
    "NeighborExchangeV2": "write it as ops.NeighborExchange of the borders",
    "_AllSwap": "use ops.AlltoAllV",
    "_HostAllGather": "use ops.AllGather",
    "_HostReduceScatter": "use ops.ReduceScatter",
    **dict.fromkeys(
        (
            "_MirrorOperator",
            "_MirrorMiniStepOperator",
            "_MirrorMicroStepOperator",
            "_MiniStepAllGather",
            "_MicroStepAllGather",
        ),
        _COMPILED,
    ),
}
REFUSED: dict[type, str] = {
    getattr(comm_ops, name): instead for name, instead in _REFUSED.items() if hasattr(comm_ops, name)
}
"""Primitives that are not supported, with the alternative."""

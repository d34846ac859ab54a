"""A stand-in for ``mindspore.mint.distributed`` on Ascend, over any transport; it rejects the calls that HCCL rejects.

With it, ranks on CPU (a *rehearsal*) run the code path of the device: :class:`.HcclTransport` makes the same calls as
on Ascend. Every call must match the signature of MindSpore's own function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.mint import distributed

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.base import Parts, Transport
from hyper_parallel.transport.frontends.mindspore_comm.host import from_host, overwrite, to_host
from hyper_parallel.transport.work import Work

__all__ = ["RehearsedHccl"]

_MOVED = ("Float16", "BFloat16", "Float32", "Float64", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32",
          "UInt64")  # fmt: skip
_REDUCED = ("Float16", "BFloat16", "Float32", "Int8", "Int16", "Int32", "Int64")
_REDUCTIONS = ("sum", "prod", "max", "min")
_REDUCING = ("all_reduce", "reduce_scatter_tensor")


class RehearsedHccl:
    """The functions of ``mindspore.mint.distributed`` that the HCCL transport calls.

    Args:
        carrier: transport of MindSpore tensors between the same ranks.

    Raises:
        UnsupportedOnBackend: (each function) HCCL would reject the call.
        TypeError: (each function) the call does not match the signature of MindSpore's function.
    """

    def __init__(self, carrier: Transport) -> None:
        self._functions = _Functions(carrier)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the function of this name, which checks its arguments first."""
        function: Callable[..., Any] = getattr(self._functions, name)

        def checked(*args: Any, **kwargs: Any) -> Any:
            _check(name, _signature(name).bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return checked


@cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(distributed, name))


def _check(name: str, arguments: dict[str, Any]) -> None:
    for x in _tensors(value for word, value in arguments.items() if word not in ("group", "obj", "object_list")):
        if not x.is_contiguous():
            raise _refusal(name, f"a tensor of shape {list(x.shape)} has strides {list(x.stride())}")
        if str(x.dtype) not in (_REDUCED if name in _REDUCING else _MOVED):
            raise _refusal(name, f"a tensor has dtype {x.dtype}")
    if arguments.get("op", "sum") not in _REDUCTIONS:
        raise _refusal(name, f"it has no reduction {arguments['op']!r}")
    if arguments.get("tag", 0):
        raise _refusal(name, f"tag {arguments['tag']} is ignored, so messages would be mixed up")


def _tensors(values: Iterator[Any]) -> Iterator[Tensor]:
    for value in values:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Tensor):
                yield each


def _refusal(name: str, what: str) -> UnsupportedOnBackend:
    return UnsupportedOnBackend(f"{name}: HCCL would refuse this call: {what}")


class _Functions:
    """The functions without checks; a group is a name that is derived from its ranks, as in MindSpore."""

    def __init__(self, carrier: Transport) -> None:
        self._carrier = carrier
        self._members: dict[str, list[int]] = {}

    def get_rank(self) -> int:
        return self._carrier.rank

    def get_world_size(self) -> int:
        return self._carrier.world_size

    def new_group(self, ranks: list[int] | None) -> str:
        members = ranks or list(range(self._carrier.world_size))
        name = "-".join(map(str, members))
        self._members[name] = members
        return name

    def get_process_group_ranks(self, group: str) -> list[int]:
        return self._members[group]

    def destroy_process_group(self, group: str | None = None) -> None:
        if group is None:
            self._carrier.close()
        else:
            del self._members[group]

    def all_reduce(self, tensor: Tensor, op: str, group: str, async_op: bool) -> Work:
        del async_op
        return self._start(lambda total: _put(tensor, total), "all_reduce", tensor, op, self._ranks(group))

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: str, async_op: bool) -> Work:
        del async_op

        def put(parts: Sequence[Tensor]) -> None:
            for target, part in zip(tensor_list, parts, strict=True):
                _put(target, part)

        return self._start(put, "all_gather", tensor, self._ranks(group), [tensor.shape] * len(self._members[group]))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], group: str, async_op: bool
    ) -> Work:
        del async_op
        sends, expects = (Parts.of([(size,) for size in sizes]) for sizes in (sent, received))
        return self._start(lambda flat: _put(output, flat), "all_to_all", tensor, self._ranks(group), sends, expects)

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: str, group: str, async_op: bool) -> Work:
        del async_op
        chunks = _split(tensor, [output.shape[0]] * len(self._members[group]))
        return self._start(lambda mine: _put(output, mine), "reduce_scatter", chunks, op, self._ranks(group))

    def broadcast(self, tensor: Tensor, src: int, group: str, async_op: bool) -> Work:
        del async_op
        return self._start(lambda value: _put(tensor, value), "broadcast", tensor, src, self._ranks(group))

    def send(self, tensor: Tensor, dst: int) -> None:
        self._carrier.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        _put(tensor, self._carrier.recv(tensor, src))

    def isend(self, tensor: Tensor, dst: int) -> Work:
        return self._start(lambda _: None, "send", tensor, dst)

    def irecv(self, tensor: Tensor, src: int) -> Work:
        return self._start(lambda value: _put(tensor, value), "recv", tensor, src)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: str) -> None:
        object_list[:] = self._carrier.all_gather_object(obj, self._ranks(group))

    def barrier(self, group: str) -> None:
        self._carrier.barrier(self._ranks(group))

    def _ranks(self, group: str) -> tuple[int, ...]:
        return tuple(self._members[group])

    def _start(self, put: Callable[[Any], None], *call: Any) -> Work:
        """Start a collective of the carrier; waiting for it fills the caller's tensors, as it does in MindSpore."""
        return self._carrier.start(*call).then(put)


def _put(target: Tensor, value: Tensor) -> None:
    """Write values into a tensor's own memory."""
    if 0 not in target.shape:
        overwrite(target, to_host(value))


def _split(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return pieces of a 1-D tensor, each with its own memory; NumPy cuts them, since its calls take microseconds."""
    array, starts = to_host(flat), np.cumsum([0, *sizes])
    return [from_host(array[start : start + size].copy()) for start, size in zip(starts, sizes, strict=False)]

"""MindSpore's transports: a bridge over numpy, the CPU rehearsal over gloo, and HCCL on Ascend devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.base import Ranks, Shape, Transport
from hyper_parallel.transport.numpy_ops import BFLOAT16

__all__ = ["NumpyBridge", "from_host", "start_rank", "start_rehearsal", "to_host"]

_NATIVE_BFLOAT16: np.dtype[Any] = Tensor([0.0], mindspore.bfloat16).asnumpy().dtype


def to_host(x: Tensor) -> np.ndarray[Any, Any]:
    """The values of ``x`` as a numpy array (:data:`BFLOAT16` for bfloat16); may share memory with ``x``."""
    array: np.ndarray[Any, Any] = x.asnumpy()
    return array.view(np.uint16).view(BFLOAT16) if array.dtype == _NATIVE_BFLOAT16 else array


def from_host(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that takes over the memory of ``array``; nothing else may hold it."""
    if array.dtype == BFLOAT16:
        array = array.view(np.uint16).view(_NATIVE_BFLOAT16)
    return Tensor.from_numpy(array)


class NumpyBridge(Transport):
    """MindSpore tensors over any transport that works on host arrays.

    Args:
        inner: the transport underneath; its results must be fresh, since they become the memory of new tensors.
        to_host: MindSpore tensor to what ``inner`` carries.
        from_host: what ``inner`` returns to a MindSpore tensor.
    """

    def __init__(
        self,
        inner: Transport,
        to_host: Callable[[Tensor], Any] = to_host,
        from_host: Callable[[Any], Tensor] = from_host,
    ) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.backend = inner.backend
        self._inner = inner
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

    def all_to_all(self, chunks: Sequence[Tensor], ranks: Ranks, shapes: Sequence[Shape]) -> list[Tensor]:
        """See :meth:`Transport.all_to_all`."""
        parts = self._inner.all_to_all([self._to_host(chunk) for chunk in chunks], ranks, shapes)
        return [self._from_host(part) for part in parts]

    def broadcast(self, x: Tensor, src: int, ranks: Ranks) -> Tensor:
        """See :meth:`Transport.broadcast`."""
        return self._from_host(self._inner.broadcast(self._to_host(x), src, ranks))

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """See :meth:`Transport.send`."""
        self._inner.send(self._to_host(x), dst, tag)

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Tensor:
        """See :meth:`Transport.recv`."""
        return self._from_host(self._inner.recv(self._to_host(like), src, tag))

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        return self._inner.all_gather_object(obj, ranks)

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        self._inner.barrier(ranks)

    def group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.group`."""
        return self._inner.group(ranks)

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`."""
        return self._inner.ranks_of(group)


def start_rank(inner: Transport) -> NumpyBridge:
    """Begin a simulated rank in a worker process: a fixed seed, since the process may have served another run."""
    mindspore.manual_seed(0)
    return NumpyBridge(inner)


def start_rehearsal(rank: int, world_size: int, init_method: str) -> NumpyBridge:
    """Join a CPU world whose carrier is gloo from PyTorch, in this same process.

    MindSpore's own CPU engine (MCCL) is not used: it reduces by sum alone, has no reduce-scatter, all-to-all or
    point-to-point, and silently truncates int64 and float64.

    Raises:
        UnsupportedOnBackend: PyTorch, which this rehearsal needs, is not installed.
    """
    try:
        import torch  # noqa: PLC0415 - an optional dependency of this rehearsal alone

        from hyper_parallel.transport.c10d import start_gloo  # noqa: PLC0415
    except ImportError as error:
        msg = "the CPU rehearsal carries MindSpore tensors over PyTorch's gloo: pip install torch (its CPU build will do)"
        raise UnsupportedOnBackend(msg) from error

    def to_torch(x: Tensor) -> torch.Tensor:
        array = to_host(x)
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def from_torch(y: torch.Tensor) -> Tensor:
        if y.dtype is torch.bfloat16:
            return from_host(y.view(torch.int16).numpy().view(BFLOAT16))
        return from_host(y.numpy())

    mindspore.manual_seed(0)
    return NumpyBridge(start_gloo(rank, world_size, init_method), to_torch, from_torch)

"""MindSpore tensors as NumPy arrays and back, and writes into a tensor's memory."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.numpy_ops import BFLOAT16

__all__ = ["empty", "from_host", "host_dtype", "to_host", "write"]

_NATIVE_BFLOAT16: np.dtype[Any] = Tensor([0.0], mindspore.bfloat16).asnumpy().dtype


def to_host(x: Tensor) -> np.ndarray[Any, Any]:
    """The values of ``x`` as a numpy array (:data:`BFLOAT16` for bfloat16); may share memory with ``x``."""
    array: np.ndarray[Any, Any] = x.asnumpy()
    return array.view(np.uint16).view(BFLOAT16) if array.dtype == _NATIVE_BFLOAT16 else array


def from_host(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that takes over the memory of ``array``, which nothing else may reference."""
    if array.dtype == BFLOAT16:
        array = array.view(np.uint16).view(_NATIVE_BFLOAT16)
    return Tensor.from_numpy(array)


def host_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of the host arrays that carry MindSpore's ``dtype``."""
    return BFLOAT16 if dtype == mindspore.bfloat16 else np.dtype(mindspore.dtype_to_nptype(dtype))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array for a result that is not there yet: NaN where the dtype has it, so that an early read shows."""
    if dtype == BFLOAT16:
        return np.full(shape, 0x7FC0, np.uint16).view(BFLOAT16)
    return np.full(shape, np.nan if np.issubdtype(dtype, np.inexact) else 0, dtype)


def write(tensor: Tensor, values: np.ndarray[Any, Any], operation: str) -> None:
    """Write ``values`` into the memory of ``tensor``, which has their shape and dtype.

    Raises:
        UnsupportedOnBackend: ``tensor`` is a view, through which MindSpore's CPU build cannot write.
    """
    if not values.size:
        return
    memory = to_host(tensor)
    if not np.shares_memory(memory, to_host(tensor)):
        msg = (
            f"{operation} writes into a tensor of shape {list(tensor.shape)} that is a view of another; MindSpore's "
            "CPU build loses such writes silently; pass a tensor of its own and copy from it"
        )
        raise UnsupportedOnBackend(msg)
    np.copyto(memory, values)

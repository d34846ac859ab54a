"""Converts MindSpore tensors to NumPy arrays and back, and writes into a tensor's memory."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.mindspore.versions import MSContext, ms_ctx_param
from hyper_parallel.transport.host.numpy_ops import BFLOAT16

__all__ = ["compiler_splits", "empty", "from_host", "host_dtype", "on_accelerator", "overwrite", "to_host", "write"]

_CONTEXT, _TARGET = MSContext.get_instance(), ms_ctx_param.device_target  # get_context takes 14 us


def _native_bfloat16() -> np.dtype[Any] | None:
    """Return MindSpore's NumPy dtype for bfloat16; None if NumPy's major version differs from that of its build."""
    try:
        return np.dtype(Tensor([0.0], mindspore.bfloat16).asnumpy().dtype)
    except TypeError:
        return None


_NATIVE_BFLOAT16 = _native_bfloat16()


def compiler_splits() -> bool:
    """Whether MindSpore's compiler shards operators: in semi-automatic and automatic parallelism."""
    return mindspore.get_auto_parallel_context("parallel_mode") in {"semi_auto_parallel", "auto_parallel"}


def on_accelerator() -> bool:
    """Whether this process computes on Ascend, where the array of a tensor is a copy of its memory."""
    return bool(_CONTEXT.get_param(_TARGET) == "Ascend")


def to_host(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the values of ``x`` as a numpy array (:data:`BFLOAT16` for bfloat16), which may share memory with ``x``.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) ``x`` is bfloat16, and MindSpore was built for a different NumPy.
    """
    if x.dtype != mindspore.bfloat16:
        return x.asnumpy()
    if _NATIVE_BFLOAT16 is None:
        raise _without_bfloat16()
    return np.asarray(x.asnumpy()).view(np.uint16).view(BFLOAT16)


def from_host(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor with the memory of ``array``, which must have no other reference; on a device, return a copy.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) ``array`` is bfloat16, and MindSpore was built for a different
            NumPy.
    """
    if array.dtype == BFLOAT16:
        if _NATIVE_BFLOAT16 is None:
            raise _without_bfloat16()
        array = array.view(np.uint16).view(_NATIVE_BFLOAT16)
    tensor = Tensor.from_numpy(array)
    return tensor.to("Ascend") if on_accelerator() else tensor


def _without_bfloat16() -> UnsupportedOnBackend:
    return UnsupportedOnBackend(
        f"MindSpore {mindspore.__version__} cannot exchange bfloat16 with NumPy {np.__version__}: MindSpore was built "
        "with a different major version of NumPy; pip install 'numpy<2', or convert the tensor to float32"
    )


def host_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of host arrays for MindSpore's ``dtype``."""
    return BFLOAT16 if dtype == mindspore.bfloat16 else np.dtype(mindspore.dtype_to_nptype(dtype))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array for a pending result, filled with NaN if the dtype has it, so that an early read is visible."""
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
    if not on_accelerator() and not np.shares_memory(to_host(tensor), to_host(tensor)):
        msg = (
            f"{operation} writes into a tensor of shape {list(tensor.shape)} that is a view of another; MindSpore's "
            "CPU build loses such writes silently; pass a separate tensor and copy the result from it"
        )
        raise UnsupportedOnBackend(msg)
    overwrite(tensor, values)


def overwrite(tensor: Tensor, values: np.ndarray[Any, Any]) -> None:
    """Write ``values`` into the memory of ``tensor``, off the graph: on Ascend by a copy, on CPU through its array."""
    if on_accelerator():
        ops.stop_gradient(tensor).copy_(from_host(np.array(values, order="C")))
    else:
        np.copyto(to_host(tensor), values)

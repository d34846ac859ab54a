"""Facet *tensors* on MindSpore, with operators that have CPU kernels, which many functions of ``mint`` lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.contract.tensors import TensorsFacet, dtype_name
from hyper_parallel.platform.mindspore.delayed import is_delayed, without_values
from hyper_parallel.platform.mindspore.ops.kernels import DTYPES, filled, write_over
from hyper_parallel.platform.mindspore.runtime import device_type
from hyper_parallel.platform.mindspore.versions import DeviceCtx

__all__ = ["MindSporeTensors"]

_FLOATING = frozenset(DTYPES[name] for name in ("float16", "float32", "float64", "bfloat16", "complex64", "complex128"))


class MindSporeTensors(TensorsFacet):
    """Plain tensors of MindSpore."""

    def is_tensor(self, obj: Any) -> bool:
        """True for any ``mindspore.Tensor``."""
        return isinstance(obj, Tensor)

    def cat(self, tensors: Sequence[Any], dim: int) -> Any:
        """``mint.cat``."""
        return mint.cat(list(tensors), dim)

    def _cat(self, parts: list[Any], dim: int) -> Any:
        return mint.cat(parts, dim)

    def narrow(self, data: Any, dim: int, start: int, length: int) -> Any:
        """A view; for a delayed tensor, a delayed tensor."""
        if is_delayed(data):
            return without_values(data, (*data.shape[:dim], length, *data.shape[dim + 1 :]))
        return mint.narrow(data, dim, start, length)

    def reshape(self, data: Any, shape: Sequence[int]) -> Any:
        """A view where strides allow, else a copy."""
        return data.reshape(tuple(shape))

    def contiguous(self, data: Any) -> Any:
        """Densely stored values; a delayed tensor has none."""
        return data if is_delayed(data) else data.contiguous()

    def copy(self, data: Any) -> Any:
        """New storage, off the graph; none on the meta device."""
        if data.device == "meta":
            with DeviceCtx("meta"):
                return mint.empty(tuple(data.shape), dtype=data.dtype)
        return Tensor.from_numpy(np.array(data.asnumpy(), order="C", copy=True))

    def detach(self, data: Any) -> Any:
        """Same storage, off the graph; a delayed tensor has no storage."""
        return without_values(data, tuple(data.shape)) if is_delayed(data) else ops.stop_gradient(data)

    def function_result(self, data: Any) -> Any:
        """A copy: while a gradient is differentiated, MindSpore detaches a view that a function returns."""
        if is_delayed(data):
            return self.detach(data)
        return ops.stop_gradient(mint.cat([data])) if data.ndim and data.size else self.copy(data)

    def is_meta(self, data: Any) -> bool:
        """True if ``data`` is delayed, or on the meta device."""
        return is_delayed(data) or str(data.device).startswith("meta")

    def zeros(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Zeros; MindSpore chooses the device itself."""
        del device
        return mint.zeros(tuple(size), dtype=mindspore.float32 if dtype is None else dtype)  # None is refused for 0-d

    def full(self, size: Sequence[int], fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
        """A constant."""
        del device
        return filled(size, fill_value, dtype)

    def zeros_like(self, data: Any) -> Any:
        """Zeros."""
        return mint.zeros(tuple(data.shape), dtype=data.dtype)

    def ones_like(self, data: Any) -> Any:
        """Ones."""
        return mint.ones(tuple(data.shape), dtype=data.dtype)

    def arange(self, start: int, end: int, step: int = 1, dtype: Any = None, device: Any = None) -> Any:
        """Integers."""
        del device
        return ops.arange(start, end, step, dtype=dtype)

    def is_floating(self, data: Any) -> bool:
        """True for floating-point and complex dtypes."""
        return data.dtype in _FLOATING

    def itemsize(self, data: Any) -> int:
        """Bytes per element."""
        return int(data.itemsize)

    def tensor_to_numpy(self, tensor: Any) -> Any:
        """Values on the host; bfloat16 becomes float32."""
        if tensor.dtype == mindspore.bfloat16:  # NumPy 2 cannot read it from MindSpore
            tensor = ops.cast(tensor, mindspore.float32)
        return np.asarray(tensor.asnumpy())

    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """A copy."""
        del device
        return Tensor.from_numpy(np.array(array, order="C", copy=True))

    def str_to_dtype(self, dtype_str: Any) -> Any:
        """A ``mindspore`` dtype."""
        name = dtype_name(dtype_str).rstrip("_")
        if name not in DTYPES:
            msg = f"str_to_dtype: unknown dtype {dtype_str!r}; known: {', '.join(sorted(DTYPES))}"
            raise ValueError(msg)
        return DTYPES[name]

    def to_device(self, data: Any, device_type: str) -> Any:
        """The tensor itself: MindSpore has one device per process and places tensors on it."""
        del device_type
        return data

    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        """The tensor itself: on MindSpore, the call that differentiates names the tensors."""
        return input_tensor

    def power_sum(self, data: Any, p: float) -> Any:
        """Return the sum of powers, computed in f32 or wider."""
        size = mint.abs(ops.stop_gradient(data))
        if data.dtype not in (mindspore.float32, mindspore.float64):
            size = size.astype(mindspore.float32)
        if 0 in size.shape:  # MindSpore's sum of no elements is uninitialised memory
            return mint.zeros((), dtype=size.dtype)
        if p == float("inf"):
            return size.max()
        return mint.sum(size if p == 1 else mint.pow(size, p))

    def root(self, data: Any, p: float) -> Any:
        """Return the ``p``-th root, computed on the host: MindSpore rounds the exponent to f32 for every base."""
        return Tensor.from_numpy(np.asarray(data.asnumpy() ** (1.0 / p), data.asnumpy().dtype))

    def maximum(self, first: Any, second: Any) -> Any:
        """``mint.maximum``."""
        return mint.maximum(first, second)

    def clamp_max(self, data: Any, high: float) -> Any:
        """``mint.clamp``."""
        return mint.clamp(data, max=high)

    def scale_(self, data: Any, factor: Any) -> None:
        """Write the product into ``data``: in-place arithmetic has no effect on the CPU build."""
        write_over(data, ops.stop_gradient(data) * factor.astype(data.dtype))

    def get_op_name(self, func: Any) -> str:
        """Name of a function, a method, or a primitive."""
        for name in (getattr(func, "name", None), getattr(func, "__name__", None)):
            if isinstance(name, str):
                return name
        return type(func).__name__

    def tensor_type_cast(self, input_data: Any, cast_type: Any) -> Any:
        """``Tensor.astype``."""
        return input_data.astype(
            self.str_to_dtype(cast_type) if isinstance(cast_type, (str, type(None))) else cast_type
        )

    def is_real_floating(self, data: Any) -> bool:
        """True for floating-point dtypes that are not complex."""
        return data.dtype in _FLOATING and data.dtype not in (mindspore.complex64, mindspore.complex128)

    def get_tensor_storage_size(self, tensor: Any) -> int:
        """``untyped_storage().nbytes()``."""
        return int(getattr(tensor, "_local", tensor).untyped_storage().nbytes())

    def ones(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Ones."""
        del device
        return mint.ones(tuple(size), dtype=mindspore.float32 if dtype is None else dtype)  # None is refused for 0-d

    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """A constant of the shape of ``tensor``; for a DTensor, ``ops.full_like``, which keeps the layout."""
        dtype = tensor.dtype if dtype is None else dtype
        if isinstance(tensor, DTensor):
            return ops.full_like(tensor, fill_value, dtype=dtype)
        return filled(tuple(tensor.shape), fill_value, dtype)

    def empty_like(self, tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """``mint.empty``, pinned only if there is an NPU; for a delayed tensor, one with the same initializer."""
        dtype = tensor.dtype if dtype is None else dtype
        if is_delayed(tensor) and device is None and dtype == tensor.dtype:
            return without_values(tensor, tuple(tensor.shape))
        pinned = pin_memory and device_type() != "cpu"
        return mint.empty(tuple(tensor.shape), dtype=dtype, device=device, pin_memory=pinned)

    def new_tensor(self, tensor_shape: Sequence[int], tensor_type: Any = None, device: Any = None) -> Any:
        """``mint.empty``."""
        device = None if device is None else _DEVICES.get(str(device).lower(), device)
        return mint.empty(tuple(tensor_shape), dtype=tensor_type or mindspore.float32, device=device)

    def device_of(self, data: Any) -> Any:
        """The device's name without its number."""
        return str(data.device).partition(":")[0]

    def fill_(self, target: Any, source: Any) -> Any:
        """Write over ``target``, off the graph; see ``ops.kernels.write_over``."""
        if 0 not in target.shape:
            write_over(ops.stop_gradient(target), ops.stop_gradient(source).astype(target.dtype))
        return target

    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """A tuple."""
        return tuple(size_list)

    @property
    def _transform(self) -> Any:
        from hyper_parallel.core.dtensor.cross_mesh import TensorTransform

        return TensorTransform()


# Names of devices in the contract and in meshes, and in MindSpore.
_DEVICES = {"cpu": "CPU", "npu": "Ascend", "meta": "meta"}

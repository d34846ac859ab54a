"""Facet *tensors* on PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from hyper_parallel._caches import register
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.tensors import Rearrangement, TensorsFacet, dtype_name
from hyper_parallel.platform.torch.region_numbers import RecordedArray
from hyper_parallel.platform.torch.runtime import device_type
from hyper_parallel.platform.torch.versions import is_view
from hyper_parallel.transport.real.c10d import materialized
from hyper_parallel.transport.real.c10d.missing_devices import missing_device

__all__ = ["TorchTensors"]

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_WIDER = {"bfloat16": torch.float32, "complex32": torch.complex64, "bcomplex32": torch.complex64}
_OF_NUMPY = {_DTYPES[name]: wider for name, wider in _WIDER.items() if name in _DTYPES}


class TorchTensors(TensorsFacet):
    """Plain tensors of PyTorch."""

    def is_tensor(self, obj: Any) -> bool:
        """True for any ``torch.Tensor``."""
        return isinstance(obj, torch.Tensor)

    def cat(self, tensors: Sequence[Any], dim: int) -> Any:
        """``torch.cat``."""
        return torch.cat(list(tensors), dim)

    def _cat(self, parts: list[Any], dim: int) -> Any:
        distinct = {id(part): part for part in parts}
        if len(distinct) == len(parts) or not parts[0].is_meta:
            return torch.cat(parts, dim)
        # Where one rank runs alone for a plan, the parts of several ranks are one object.
        lengths = {key: part.shape[dim] for key, part in distinct.items()}
        shape = list(parts[0].shape)
        shape[dim] = sum(lengths[id(part)] for part in parts)
        return parts[0].new_empty(shape)

    def narrow(self, data: Any, dim: int, start: int, length: int) -> Any:
        """A view."""
        return data.narrow(dim, start, length)

    def reshape(self, data: Any, shape: Sequence[int]) -> Any:
        """A view where strides allow, else a copy."""
        return data.reshape(tuple(shape))

    def contiguous(self, data: Any) -> Any:
        """Densely stored values."""
        return materialized(data).contiguous()

    def rearranged(self, data: Any, how: Rearrangement) -> Any:
        """Return the elements in another order; a dense tensor is read by strides, in one call instead of three."""
        values = materialized(data)
        if values.is_contiguous():
            dense = torch.as_strided_copy(values, how.sizes, how.strides)
            return dense if how.result is how.sizes else dense.resize_(how.result)  # reshape() would make a view
        return super().rearranged(values, how)

    def copy(self, data: Any) -> Any:
        """New storage, off the graph."""
        return data.detach().clone()

    def dense_by_chance(self, local: Any, layout: Any) -> bool:
        """Compare strides: a shard of length 1 or 0 along a dim is contiguous in several orders of its dims."""
        if not any(size <= 1 and size < whole for size, whole in zip(local.shape, layout.shape, strict=True)):
            return False
        return not _is_contiguous(tuple(layout.shape), global_strides(local, layout.shape))

    def dense_copy(self, local: Any) -> Any:
        """Return a row-major copy, also of a tensor that is contiguous in several orders."""
        return local.clone(memory_format=torch.contiguous_format)

    def can_view(self, local: Any, shape: Sequence[int], target: Sequence[int]) -> bool:
        """Decide by strides; if ``local`` is contiguous, so is the global tensor."""
        return _can_view(local.shape, local.stride(), tuple(shape), tuple(target))

    def storing_like(
        self, part: Sequence[int], shapes: Sequence[Sequence[int]], stays: Sequence[bool]
    ) -> Callable[[Any, Sequence[Any]], Any]:
        """Return a function that sets strides in PyTorch's order for the operands; row-major if all operands are."""
        wholes = [tuple(shape) for shape in shapes]
        usual = _dense_strides(part) if all(stays) and len(set(wholes)) == 1 else None

        def store(data: Any, operands: Sequence[Any]) -> Any:
            strides = data.stride()
            if strides == usual:
                for operand in operands:
                    if operand.stride() != usual:
                        break
                else:
                    return data
            parts = [(x.shape, x.stride()) if stayed else None for x, stayed in zip(operands, stays, strict=True)]
            order = _order_to_store(data.shape, strides, tuple(zip(wholes, parts, strict=True)))
            return data if order is None else _stored(data, order)

        return store

    def detach(self, data: Any) -> Any:
        """Same storage, off the graph."""
        return data.detach()

    def function_result(self, data: Any) -> Any:
        """The tensor itself, unless it is a view."""
        return data.detach() if is_view(data) else data

    def zeros(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Zeros."""
        return torch.zeros(tuple(size), dtype=dtype, device=device)

    def full(self, size: Sequence[int], fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
        """A constant."""
        return torch.full(tuple(size), fill_value, dtype=dtype, device=device)

    def zeros_like(self, data: Any) -> Any:
        """Zeros."""
        return torch.zeros_like(data)

    def ones_like(self, data: Any) -> Any:
        """Ones."""
        return torch.ones_like(data)

    def arange(self, start: int, end: int, step: int = 1, dtype: Any = None, device: Any = None) -> Any:
        """Integers."""
        return torch.arange(start, end, step, dtype=dtype, device=device)

    def is_floating(self, data: Any) -> bool:
        """True for floating-point and complex dtypes."""
        return data.dtype.is_floating_point or data.dtype.is_complex

    def itemsize(self, data: Any) -> int:
        """Bytes per element."""
        return data.element_size()

    def tensor_to_numpy(self, tensor: Any) -> Any:
        """Values on the host; bfloat16 becomes float32, and complex32 complex64, because NumPy lacks them."""
        plain = materialized(tensor.detach()).cpu()
        return plain.to(_OF_NUMPY.get(plain.dtype, plain.dtype)).numpy()

    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """A copy, contiguous also for an empty array, to which PyTorch gives the strides of an expanded tensor."""
        if isinstance(array, RecordedArray):
            return array.tensor(device)
        tensor = torch.tensor(array, device=device)
        return tensor if tensor.numel() else tensor.clone(memory_format=torch.contiguous_format)

    def str_to_dtype(self, dtype_str: Any) -> Any:
        """A ``torch.dtype``."""
        name = dtype_name(dtype_str)
        if name not in _DTYPES:
            msg = f"str_to_dtype: unknown dtype {dtype_str!r}; known: {', '.join(sorted(_DTYPES))}"
            raise ValueError(msg)
        return _DTYPES[name]

    def to_device(self, data: Any, device_type: str) -> Any:
        """``Tensor.to``; meta tensors stay where they are."""
        if not self.differing_device(data, device_type):
            return data
        problem = "" if device_type == "cpu" else missing_device(device_type)
        if problem:
            msg = f"a mesh on {device_type}: PyTorch sees no such device; {problem}, or make the mesh for cpu"
            raise UnsupportedOnBackend(msg)
        return data.to(device_type)

    def differing_device(self, data: Any, device_type: str) -> str:
        """``device.type``; meta tensors belong to any device."""
        here: str = data.device.type
        return "" if here in (device_type, "meta") else here

    def is_dense(self, data: Any) -> bool:
        """Return False for sparse tensors and for special dense formats such as oneDNN's."""
        return data.layout is torch.strided

    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        """``requires_grad_()``."""
        return input_tensor.requires_grad_()

    def power_sum(self, data: Any, p: float) -> Any:
        """Return the sum of powers, computed in float32 or wider."""
        size = data.detach().abs()
        size = size.to(torch.promote_types(size.dtype, torch.float32))
        if p == float("inf"):
            return size.max() if size.numel() else size.new_zeros(())
        return size.sum() if p == 1 else size.pow(p).sum()

    def maximum(self, first: Any, second: Any) -> Any:
        """``torch.maximum``."""
        return torch.maximum(first, second)

    def clamp_max(self, data: Any, high: float) -> Any:
        """``Tensor.clamp``."""
        return data.clamp(max=high)

    def scale_(self, data: Any, factor: Any) -> None:
        """``mul_``."""
        data.detach().mul_(factor.to(device=data.device, dtype=data.dtype))

    def get_op_name(self, func: Any) -> str:
        """Name of a function, a method or an operator overload."""
        packet = getattr(func, "overloadpacket", func)
        name = getattr(packet, "__name__", None)
        return str(name if isinstance(name, str) else type(packet).__name__)

    def tensor_type_cast(self, input_data: Any, cast_type: Any) -> Any:
        """``Tensor.to``."""
        return input_data.to(self.str_to_dtype(cast_type) if not isinstance(cast_type, torch.dtype) else cast_type)

    def is_real_floating(self, data: Any) -> bool:
        """True for floating-point dtypes that are not complex."""
        return data.dtype.is_floating_point

    def get_tensor_storage_size(self, tensor: Any) -> int:
        """``untyped_storage().nbytes()``."""
        local = getattr(tensor, "_local", tensor)
        return local.untyped_storage().nbytes()

    def ones(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Ones."""
        return torch.ones(tuple(size), dtype=dtype, device=device)

    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """``torch.full_like``."""
        return torch.full_like(tensor, fill_value, dtype=dtype)

    def empty_like(self, tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """``torch.empty_like``."""
        pinned = pin_memory and device_type() != "cpu"
        return torch.empty_like(tensor, dtype=dtype, device=device, pin_memory=pinned)

    def new_tensor(self, tensor_shape: Sequence[int], tensor_type: Any = None, device: Any = None) -> Any:
        """``torch.empty``."""
        return torch.empty(tuple(tensor_shape), dtype=tensor_type, device=device)

    def device_of(self, data: Any) -> Any:
        """``device``."""
        return data.device

    def fill_(self, target: Any, source: Any) -> Any:
        """``copy_`` through a detached alias."""
        target.detach().copy_(source.detach())
        return target

    def _unwritable(self, data: Any) -> str:
        """Return why a tensor cannot be received into: it is sparse, nested, or an inference tensor."""
        if data.layout is not torch.strided or data.is_nested:
            return f"its layout is {'nested' if data.is_nested else data.layout}; pass a dense tensor"
        if data.is_inference() and not torch.is_inference_mode_enabled():
            return "it was made in inference mode, which is off now; pass its clone()"
        return ""

    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """``torch.Size``."""
        return torch.Size(size_list)

    @property
    def _transform(self) -> Any:
        from hyper_parallel.core.dtensor.cross_mesh import TensorTransform

        return TensorTransform()


def _stored(data: Any, order: Sequence[int]) -> Any:
    """The values of ``data`` in new storage, its dims in ``order``, from the outermost to the innermost."""
    ordered = data.permute(order)
    back = sorted(range(data.ndim), key=order.__getitem__)
    stored = data.new_empty(ordered.shape).permute(back).detach()  # not a view: writes must not reach a base
    return stored.copy_(data)


_Source = tuple[tuple[int, ...], "tuple[tuple[int, ...], tuple[int, ...]] | None"]
"""Global shape of an operand, and shape and strides of its local tensor; None if the global one is contiguous."""


@lru_cache(maxsize=4096)
def _order_to_store(
    part: tuple[int, ...], strides: tuple[int, ...], operands: tuple[_Source, ...]
) -> tuple[int, ...] | None:
    """The order of dims, outermost in memory first, in which to store an elementwise result; None if it has that order.

    Args:
        part: shape of the local result.
        strides: strides of the local result.
        operands: every operand.
    """
    order = _elementwise_order(
        tuple((shape, None if local is None else _global_strides(*local, shape)) for shape, local in operands)
    )
    ordered = tuple(part[dim] for dim in order)
    return None if tuple(strides[dim] for dim in order) == _dense_strides(ordered) else order


register("orders in which results are to be stored", _order_to_store)


@lru_cache(maxsize=4096)
def _elementwise_order(operands: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...]) -> tuple[int, ...]:
    """The dims of an elementwise result from the outermost in memory to the innermost.

    Args:
        operands: shape and strides of every operand; None for strides of a contiguous one.
    """
    parts = [torch.empty_strided(shape, strides or _dense_strides(shape), device="meta") for shape, strides in operands]
    whole = (torch.neg, torch.add, torch.addcmul)[min(len(parts), 3) - 1](*parts[:3])
    dims, strides = range(whole.ndim), whole.stride()
    return tuple(dims) if whole.is_contiguous() else tuple(sorted(dims, key=lambda dim: -strides[dim]))


register("orders of elementwise results in memory", _elementwise_order)


def global_strides(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of ``shape`` whose dims lie in memory in the order of those of ``local``.

    If a dim is split, the strides of the dims outside of it are larger in the global tensor than in a local one. Of
    dims of equal strides, the inner one has one local element or none; between two such dims a rank assumes row-major
    order.
    """
    return _global_strides(local.shape, local.stride(), tuple(shape))


@lru_cache(maxsize=4096)
def _global_strides(part: tuple[int, ...], part_strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compute :func:`global_strides` from the shape and the strides of the local tensor."""
    strides = list(part_strides)
    order = sorted(range(len(part)), key=lambda dim: (strides[dim], part[dim] > 1, -dim))
    grown, shrunk = 1, 1
    for dim in order:
        strides[dim] = strides[dim] * grown // shrunk
        if part_strides[dim]:
            grown, shrunk = grown * max(shape[dim], 1), shrunk * max(part[dim], 1)
    return tuple(strides)


@lru_cache(maxsize=4096)
def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether PyTorch calls a tensor of ``shape`` and ``strides`` contiguous."""
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


@lru_cache(maxsize=4096)
def _can_view(
    part: tuple[int, ...], part_strides: tuple[int, ...], shape: tuple[int, ...], target: tuple[int, ...]
) -> bool:
    """Whether PyTorch can view a tensor of ``shape``, stored in the order of dims of a local one, as ``target``."""
    try:
        torch.empty_strided(shape, _global_strides(part, part_strides, shape), device="meta").view(target)
    except (RuntimeError, ValueError):  # the latter while a compiled module is traced
        return False
    return True


register("strides of whole tensors", _global_strides)
register("tensors that PyTorch calls contiguous", _is_contiguous)
register("views of whole tensors", _can_view)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))

"""Reads a rank's tensor as a NumPy array, and its region in the global tensor if it is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor as TorchDTensor, Partial, Replicate, Shard

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.transport.real.c10d import to_host
from hyper_parallel.verify.frameworks.contract.records import LocalValue, Pending, Region, region_of

__all__ = ["HALF_TYPES", "lent", "local_of", "read_part", "read_saved", "read_tensor"]

HALF_TYPES = (torch.bfloat16, torch.float16)
"""Dtypes that are recorded as float32: NumPy has no bfloat16."""

_LENT: ContextVar[bool] = ContextVar("hyper_parallel_lent_tensors", default=False)

_REDUCTIONS = ("sum", "avg", "max", "min")


def read_tensor(value: Any) -> LocalValue | None:
    """Return a copy of a rank's shard of a tensor, with its region in the global tensor.

    The region is None for a plain tensor, and for a DTensor whose local tensor is not a box of the global tensor. The
    function returns None if ``value`` is not a tensor, if this rank is not in the DTensor's mesh, or if a placement is
    of an unknown class.

    Args:
        value: any object. bfloat16 and float16 become float32, and sparse tensors become dense.
    """
    if isinstance(value, (DTensor, TorchDTensor)) and value.device_mesh.get_coordinate() is None:
        return None
    if isinstance(value, DTensor):
        return _read(value._local, region_of(value))
    if isinstance(value, TorchDTensor):
        if not all(_is_known(placement) for placement in value.placements):
            return None
        return _read(_local_tensor_of(value), _region(value))
    return _read(value) if isinstance(value, torch.Tensor) else None


def read_saved(path: Path) -> Any:
    """Return the tensor in a file of ``torch.save`` as a NumPy array; dtypes that NumPy lacks become float32.

    Raises:
        ValueError: the file is damaged, or does not contain exactly one tensor; no code in the file was executed.
    """
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise errors of any type
        raise ValueError("the file is damaged, or has other objects than tensors") from error
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("the file does not have exactly one tensor")  # noqa: TRY004 - the file is wrong, not an argument
    plain = tensor.detach()
    return np.array((plain.float() if plain.is_floating_point() and plain.dtype != torch.float64 else plain).numpy())


@contextmanager
def lent() -> Iterator[None]:
    """Context in which values are read without a copy; use them before the program continues and overwrites them."""
    token = _LENT.set(True)
    try:
        yield
    finally:
        _LENT.reset(token)


def read_part(parameter: Any, value: Any) -> LocalValue | None:
    """Return :func:`read_tensor` of a parameter, its gradient or state, without the padding of FSDP1.

    Args:
        parameter: the parameter; a shard of a flat parameter of FSDP1 may end with padding.
        value: the parameter itself, or a tensor of its shape; tensors of different shapes are read unchanged.
    """
    taken = read_tensor(value)
    padding = getattr(parameter, "_shard_numel_padded", 0)
    if taken is None or not padding or taken.array.shape != tuple(parameter._sharded_size):  # noqa: SLF001 - no public name
        return taken
    return taken._replace(array=taken.array[: len(taken.array) - padding], region=None)


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor, or any other tensor itself."""
    if isinstance(value, DTensor):
        return value._local
    return _local_tensor_of(value) if isinstance(value, TorchDTensor) else value


def _local_tensor_of(value: TorchDTensor) -> torch.Tensor:
    return value._local_tensor  # noqa: SLF001 - to_local() would record a conversion for backward


def _read(tensor: torch.Tensor, region: Region | None = None) -> LocalValue:
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor.dtype in HALF_TYPES else ""
    return LocalValue(_array(tensor), region, dtype)


def _array(tensor: torch.Tensor) -> Any:
    if _LENT.get() and tensor.layout is torch.strided:
        return tensor.detach()
    with torch.no_grad():
        plain = tensor.detach()
        plain = plain.to_dense() if plain.layout is not torch.strided else plain
        if _LENT.get():
            return plain
        copied = plain.float() if plain.dtype in HALF_TYPES else plain.clone()
        return to_host(copied)  # FSDP resizes its storages, which PyTorch forbids while NumPy shares the memory


def _is_known(placement: Any) -> bool:
    if type(placement) is Partial:
        return placement.reduce_op in _REDUCTIONS
    return isinstance(placement, Replicate) or placement.is_shard() or _is_strided(placement)


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def _region(value: TorchDTensor) -> Region | None:
    """Return the region of this rank's shard; None if the shard is not a box. The rank must be in the mesh."""
    coordinate: Any = value.device_mesh.get_coordinate()
    starts = [_start(value, dim, coordinate) for dim in range(value.ndim)]
    if None in starts:
        return None
    pending = tuple(
        Pending(placement.reduce_op, _ranks_along(value, axis, coordinate))
        for axis, placement in enumerate(value.placements)
        if isinstance(placement, Partial)
    )
    return Region(tuple(value.shape), tuple(start for start in starts if start is not None), pending)


def _start(value: TorchDTensor, dim: int, coordinate: Sequence[int]) -> int | None:
    """Return the first index of the rank's shard of ``dim``; None if its indices are not consecutive."""
    indices = torch.arange(value.shape[dim])
    for axis, placement in enumerate(value.placements):
        placed: Any = placement
        if not (isinstance(placed, Shard) or _is_strided(placed)) or placed.dim % value.ndim != dim:
            continue
        along: Any = type(placed)(0, split_factor=placed.split_factor) if _is_strided(placed) else Shard(0)
        split = along._split_tensor  # noqa: SLF001 - PyTorch's own splitting, for uneven and strided shards
        parts = split(indices, value.device_mesh.size(axis), with_padding=False, contiguous=True)[0]
        indices = parts[coordinate[axis]]
    if not len(indices):
        return int(value.shape[dim])
    consecutive = bool(torch.equal(indices, torch.arange(int(indices[0]), int(indices[0]) + len(indices))))
    return int(indices[0]) if consecutive else None


def _ranks_along(value: TorchDTensor, axis: int, coordinate: Sequence[int]) -> tuple[int, ...]:
    place: list[Any] = list(coordinate)
    place[axis] = slice(None)
    return tuple(value.device_mesh.mesh[tuple(place)].tolist())

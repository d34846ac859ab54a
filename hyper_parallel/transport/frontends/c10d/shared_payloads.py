"""Payloads of ranks that are processes: pickled, with the memory of large tensors in files that the receivers map.

The coordinator passes payloads on without reading them. A file is deleted when every receiver has mapped it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Packed", "SharedFiles", "pack", "unpack"]

_INLINE_BYTES = 1 << 15
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled payload.

    Attributes:
        data: the pickle of the payload, without the memory of tensors.
        sizes: size of the memory of each tensor, in bytes.
        memory: memory of all tensors; empty if it is in a file.
        path: path of the file with the memory of all tensors; empty without a file.
    """

    data: bytes
    sizes: tuple[int, ...] = ()
    memory: bytes = b""
    path: str = ""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: list[memoryview]) -> None:
        super().__init__(file, protocol=5)
        self._memory = memory

    def reducer_override(self, obj: Any) -> Any:
        """Leave the memory of plain tensors out."""
        plain = type(obj) is torch.Tensor and obj.layout is torch.strided and obj.is_cpu and obj.is_contiguous()
        if not plain or obj.is_quantized or obj.is_conj() or obj.is_neg() or obj.requires_grad:
            return NotImplemented
        if obj.numel():
            self._memory.append(_bytes_of(obj))
        return _Tensor, (obj.dtype, tuple(obj.shape))


@dataclass(frozen=True)
class _Tensor:
    """The data from which :class:`_Unpickler` makes a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._parts = iter(parts)

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function; for ``_Tensor``, the method that makes a tensor from the next block of memory."""
        return self._tensor if (module, name) == (__name__, _Tensor.__name__) else super().find_class(module, name)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return next(self._parts).view(dtype).view(shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's memory; by DLPack, since a program cannot resize a storage any more after ``numpy()``."""
    array: Any = np.from_dlpack(tensor.reshape(-1).view(torch.uint8))
    return memoryview(array)


def pack(payload: Any, folder: str) -> Packed:
    """Pickle a payload; the memory of its tensors goes to a new file in ``folder`` if it is large."""
    memory: list[memoryview] = []
    file = io.BytesIO()
    _Pickler(file, memory).dump(payload)
    sizes = tuple(part.nbytes for part in memory)
    if sum(sizes) < _INLINE_BYTES:
        return Packed(file.getvalue(), sizes, b"".join(map(_padded, memory)))
    handle, path = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as shared:
        for part in memory:
            shared.write(part)
            shared.write(bytes(-part.nbytes % _ALIGNMENT))
    return Packed(file.getvalue(), sizes, path=path)


def _padded(part: memoryview) -> bytes:
    return bytes(part) + bytes(-part.nbytes % _ALIGNMENT)


def unpack(packed: Packed) -> Any:
    """Return the payload; writes to its tensors do not affect other ranks."""
    parts: list[torch.Tensor] = []
    if packed.sizes:
        buffer: Any = bytearray(packed.memory)
        if packed.path:
            with Path(packed.path).open("rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        offset = 0
        for size in packed.sizes:
            parts.append(torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset))
            offset += size + -size % _ALIGNMENT
    return _Unpickler(io.BytesIO(packed.data), parts).load()


class SharedFiles:
    """Deletes the file of a payload when all ranks that receive the payload have mapped the file."""

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}

    def sent(self, payloads: Sequence[Any]) -> None:
        """Count the receiving ranks of each file."""
        for payload in payloads:
            if isinstance(payload, Packed) and payload.path:
                self._uses[payload.path] = self._uses.get(payload.path, 0) + 1

    def mapped(self, payloads: Sequence[Any]) -> None:
        """Record that one rank has mapped the files of payloads."""
        for payload in payloads:
            if isinstance(payload, Packed) and payload.path:
                self._uses[payload.path] -= 1
                if not self._uses[payload.path]:
                    del self._uses[payload.path]
                    Path(payload.path).unlink()

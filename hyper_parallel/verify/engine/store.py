"""Arrays of records on disk: written once, read when they are compared; equal arrays of ranks share storage.

A :class:`StoredArray` replaces the array in a record. It knows the array's shape, dtype and digest. The values are read
from disk when NumPy asks for them, so no complete run is ever in memory. A stored array can be sent to other processes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.transport.serialization import unpack
from hyper_parallel.verify.engine.scratch import Scratch

__all__ = [
    "ArrayFile",
    "StoredArray",
    "digest_of",
    "first_rows",
    "forget",
    "is_constant",
    "is_finite",
    "largest",
    "read_at",
    "same_values",
    "write_at",
]

_SMALL = 32
"""Largest number of elements of arrays that stay in memory."""


@dataclass(frozen=True)
class StoredArray:
    """An array on disk.

    Attributes:
        path: path of the file.
        offset: offset of the array's first byte in the file.
        shape: shape of the array.
        dtype: dtype of its elements.
        digest: SHA-1 of shape, dtype and bytes: equal for equal arrays.
        largest: largest finite magnitude; 0 if there is none.
        constant: whether all elements are equal.
        finite: whether no element is infinite or NaN.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    digest: bytes
    largest: float
    constant: bool
    finite: bool

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Read the values into a new array."""
        if copy is False:
            raise ValueError("the values are on disk; reading them makes an array")
        array = read_array(self.path, self.offset, self.shape, self.dtype)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        """Return the size of the first dim."""
        return self.shape[0]


class ArrayFile:
    """A file to which arrays are appended; ranks that are threads share one file, and equal arrays are stored once.

    Args:
        scratch: the folder, which counts the bytes.
        name: name of the file.
        index: name of a folder through which the processes of ranks find equal arrays of each other; empty for none.
    """

    def __init__(self, scratch: Scratch, name: str, index: str = "") -> None:
        self._scratch, self.path = scratch, scratch.file(name)
        self._descriptor: int | None = None
        self._end, self._lock = 0, threading.Lock()
        self._known: dict[bytes, StoredArray] = {}
        self._index = Path(scratch.file(index)) if index else None
        if self._index is not None:
            self._index.mkdir(exist_ok=True)

    def put(self, array: Any, what: str) -> Any:
        """Store ``array`` and return its replacement: a :class:`StoredArray`, or the array itself if it is small.

        Args:
            array: NumPy array, which must not be written to later.
            what: description of the record, for a message.

        Raises:
            ScratchError: the array does not fit.
        """
        if array.size <= _SMALL:
            return array
        array = np.ascontiguousarray(array)
        digest = digest_of(array)
        known = self._known.get(digest) or self._of_others(digest)
        if known is not None:
            return known
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY)
            self._scratch.require(array.nbytes, what)
            offset, self._end = self._end, self._end + array.nbytes
        write_at(self._descriptor, array, offset)
        stored = StoredArray(
            self.path, offset, array.shape, array.dtype, digest, largest(array), is_constant(array), is_finite(array)
        )
        self._known[digest] = stored
        if self._index is not None:
            whole = self._index / f"{digest.hex()}.{os.getpid()}"
            whole.write_bytes(pickle.dumps(stored))
            whole.replace(self._index / digest.hex())
        return stored

    def _of_others(self, digest: bytes) -> StoredArray | None:
        """Return the array with this digest that another process has stored; None if there is none."""
        if self._index is None:
            return None
        try:
            data = (self._index / digest.hex()).read_bytes()
        except FileNotFoundError:
            return None
        stored: StoredArray = unpack(data)
        self._known[digest] = stored
        return stored

    def close(self) -> None:
        """Delete the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        forget(self.path)
        self._scratch.drop(self.path)


def forget(path: str) -> None:
    """Close the descriptor by which this process reads a file, before the file is deleted."""
    with _DESCRIPTORS_LOCK:
        descriptor = _DESCRIPTORS.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def digest_of(value: Any) -> bytes:
    """Return a digest of shape, dtype and bytes, which equal arrays share."""
    if isinstance(value, StoredArray):
        return value.digest
    array = np.ascontiguousarray(value)
    digest = hashlib.sha1(f"{array.shape}{array.dtype.str}".encode(), usedforsecurity=False)
    digest.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return digest.digest()


def same_values(one: Any, other: Any) -> bool:
    """Return whether two arrays have the same shape, dtype and bits."""
    return one is other or digest_of(one) == digest_of(other)


def first_rows(value: Any, dim: int, count: int) -> Any:
    """Return the first ``count`` rows of ``dim`` of an array; rows of dim 0 of a stored array stay on disk."""
    array = np.asarray(value)[(slice(None),) * dim + (slice(count),)]
    if not isinstance(value, StoredArray) or dim or not array.size:
        return array
    facts = digest_of(array), largest(array), is_constant(array), is_finite(array)
    return StoredArray(value.path, value.offset, array.shape, value.dtype, *facts)


def largest(value: Any) -> float:
    """Return the largest finite magnitude in an array; 0 if there is none."""
    if isinstance(value, StoredArray):
        return value.largest
    array = np.asarray(value)
    if array.dtype.kind not in "fciub" or not array.size:
        return 0.0
    if array.dtype.kind != "f":
        array = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        most, least = float(array.max()), float(array.min())
    if np.isfinite(most) and np.isfinite(least):
        return max(abs(most), abs(least))
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def is_constant(value: Any) -> bool:
    """Return whether all elements of an array are equal; False for an array without elements."""
    if isinstance(value, StoredArray):
        return value.constant
    array = np.asarray(value)
    return bool(array.size) and bool((array == array.flat[0]).all())


def is_finite(value: Any) -> bool:
    """Return whether no element of an array is infinite or NaN."""
    if isinstance(value, StoredArray):
        return value.finite
    array = np.asarray(value)
    if array.dtype.kind not in "fc" or not array.size:
        return True
    with np.errstate(invalid="ignore", over="ignore"):
        total = array.sum()
    return bool(np.isfinite(total) or np.isfinite(array).all())


def read_array(path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the array at ``offset`` of a file."""
    array = np.empty(shape, dtype)
    read_at(_descriptor(path), array, offset)
    return array


_DESCRIPTORS: dict[str, int] = {}
_DESCRIPTORS_LOCK = threading.Lock()


def _descriptor(path: str) -> int:
    """Return the descriptor by which this process reads a file; it stays open until the file is deleted."""
    with _DESCRIPTORS_LOCK:
        if path not in _DESCRIPTORS:
            _DESCRIPTORS[path] = os.open(path, os.O_RDONLY)
        return _DESCRIPTORS[path]


def write_at(descriptor: int, array: Any, offset: int) -> None:
    """Write the bytes of a contiguous array to an open file."""
    data = memoryview(array.reshape(-1).view(np.uint8))
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def read_at(descriptor: int, array: Any, offset: int) -> None:
    """Fill a contiguous array with bytes of an open file; raises OSError if the file is too short."""
    data = memoryview(array.reshape(-1).view(np.uint8))
    while data:
        count = os.preadv(descriptor, [data], offset)
        if not count:
            msg = "a file of the scratch folder is shorter than what was written to it"
            raise OSError(msg)
        data, offset = data[count:], offset + count

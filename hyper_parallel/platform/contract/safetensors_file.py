"""Files in the safetensors format: arrays of every dtype, written atomically, read without executing anything."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import CheckpointError, CheckpointWriteError
from hyper_parallel.transport.host.numpy_ops import BFLOAT16

if TYPE_CHECKING:
    import numpy as np

__all__ = ["atomically", "check_regular", "read", "unusable", "write"]

# First bytes of other formats.
_PICKLE, _ZIP = b"\x80", b"PK\x03\x04"
_NUMPY = {
    "F64": "float64", "F32": "float32", "F16": "float16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODES = {name: code for code, name in _NUMPY.items()}
_UNICODE = re.compile(r"[^\ud800-\udfff]*")


def unusable(names: Iterable[str]) -> list[str]:
    """Return the reason for each name that no tensor of a safetensors file can have; other readers would fail."""
    problems = []
    for name in names:
        if name == "__metadata__":
            problems.append(f"{name} is not the name of a tensor: safetensors reserves this name; rename it")
        elif not _UNICODE.fullmatch(name):
            problems.append(f"{name!r} is not the name of a tensor: it has a lone surrogate; rename it")
    return problems


def check_regular(path: Path, caller: str) -> None:
    """Refuse to read from a FIFO or a device, which may never end; readers report missing files and folders.

    Raises:
        CheckpointError: (a ValueError) a FIFO, a device or a socket is at ``path``.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        msg = f"{caller}: {path} is not a regular file; load a copy of the checkpoint on a file system"
        raise CheckpointError(msg)


def write(arrays: Mapping[str, np.ndarray[Any, Any]], path: Path) -> None:
    """Write arrays to a file; an old file is replaced once the new one is complete.

    Raises:
        CheckpointError: (a ValueError) the format does not support a dtype or a name.
        CheckpointWriteError: (an OSError) the file cannot be written.
    """
    import numpy as np
    from safetensors import TensorSpec, serialize_file

    if problems := unusable(arrays):
        msg = f"save_checkpoint: {'; '.join(problems)}"
        raise CheckpointError(msg)
    table, kept = {}, []
    for name, array in arrays.items():
        plain = np.ascontiguousarray(array).reshape(array.shape)
        dtype = "bfloat16" if array.dtype == BFLOAT16 else str(array.dtype)
        if dtype not in _CODES and dtype != "bfloat16":
            msg = f"save_checkpoint: {name} is {dtype}, which safetensors does not support; convert it first"
            raise CheckpointError(msg)
        kept.append(plain)  # the table holds addresses only
        table[name] = TensorSpec(
            dtype=dtype, shape=list(array.shape), data_ptr=plain.ctypes.data, data_len=plain.nbytes
        )
    atomically(path, lambda part: serialize_file(table, str(part), {"format": "hyper_parallel"}))


def atomically(path: Path, fill: Callable[[Path], Any]) -> None:
    """Write atomically: ``fill`` writes a temporary file next to ``path``, which then replaces ``path``.

    Raises:
        CheckpointWriteError: (an OSError) the file cannot be written; an old file at ``path`` is unchanged.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        fill(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except CheckpointError:  # an error of the values, not of the disk
        part.unlink(missing_ok=True)
        raise
    except Exception as error:
        if path.parent.is_dir():
            part.unlink(missing_ok=True)
        msg = f"save_checkpoint: {path} cannot be written ({error}); the previous file is unchanged"
        raise CheckpointWriteError(msg) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that the new name survives a power failure too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a file by name, each in memory of its own.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: (a ValueError) the file is truncated or of another format.
    """
    import numpy as np
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        start = file.read(8)
        _check_start(path, start)
        try:
            with safe_open(str(path), framework="np"):  # checks sizes and offsets against the file
                pass
        except SafetensorError as error:
            msg = f"load_checkpoint: {path} is not a complete safetensors file ({error}); load another copy"
            raise CheckpointError(msg) from error
        length = int.from_bytes(start, "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        arrays = {}
        for name, entry in header.items():
            dtype = _dtype(path, name, entry["dtype"])
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            values = np.fromfile(file, np.uint8, end - begin)
            arrays[name] = values.view(dtype).reshape(entry["shape"])
    return arrays


def _dtype(path: Path, name: str, code: str) -> Any:
    import numpy as np

    if code == "BF16":
        return BFLOAT16
    if code not in _NUMPY:
        msg = f"load_checkpoint: {name} in {path} is {code}; supported: BF16, {', '.join(sorted(_NUMPY))}"
        raise CheckpointError(msg)
    return np.dtype(_NUMPY[code])


def _check_start(path: Path, start: bytes) -> None:
    other_format = "a zip archive, as torch.save writes" if start.startswith(_ZIP) else None
    # The upper bytes of a header's length are zero, but a pickle has opcodes at this position.
    if start.startswith(_PICKLE) and any(start[4:]):
        other_format = "a pickle"
    if other_format is not None:
        msg = (
            f"load_checkpoint: {path} is {other_format}, not safetensors; it was not loaded, since that may execute "
            "code"
        )
        raise CheckpointError(msg)

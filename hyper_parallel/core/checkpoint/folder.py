"""The folder of a checkpoint: an index in JSON, and one safetensors file that ranks write in parts."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.contract.safetensors_file import check_regular
from hyper_parallel.transport.atomic_files import atomic_write_text
from hyper_parallel.transport.host.numpy_ops import BFLOAT16

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from hyper_parallel.core.dtensor.layout import Box

__all__ = [
    "INDEX", "VERSION", "DataFile", "Entry", "Index", "Piece", "checksum", "code_of", "read_index", "write_index",
]  # fmt: skip

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
VERSION = 1
_ALIGNMENT = 8
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_OWN_FILE = re.compile(r"data-[0-9a-f]{32}\.safetensors")
_KEYS = {"version", "file", "tree", "ties", "tensors", "checksum"}
_DTYPES = {code: name for name, code in _CODES.items()}

Piece = tuple["Box", int]
"""A part of a tensor as it was written, and its CRC-32."""


@dataclass(frozen=True)
class Entry:
    """A tensor in the data file: its safetensors dtype, its global shape."""

    code: str
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in the frameworks."""
        return _DTYPES[self.code]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        import numpy as np

        return BFLOAT16 if self.code == "BF16" else np.dtype(self.dtype_name)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def code_of(name: str, dtype: Any) -> str:
    """Return the safetensors name of a framework's ``dtype``.

    Raises:
        CheckpointError: (a ValueError) the format does not have this dtype.
    """
    short = str(dtype).rpartition(".")[2].lower()
    if short not in _CODES:
        msg = f"save: {name} is {short}, which safetensors does not support; convert it first"
        raise CheckpointError(msg)
    return _CODES[short]


class DataFile:
    """A safetensors file; each rank reads and writes parts of it.

    Args:
        path: the file.
        entries: its tensors by name; all ranks have the same.
        header: its first bytes, and where each tensor begins after them; by default as ``save`` writes them.
    """

    def __init__(
        self, path: Path, entries: dict[str, Entry], header: tuple[bytes, dict[str, int]] | None = None
    ) -> None:
        self.path, self.entries = path, entries
        self._header, self._offsets = header or _header(entries)
        self.size = len(self._header) + sum(entry.size for entry in entries.values())

    @classmethod
    def existing(cls, path: Path) -> DataFile:
        """Return the data file of an existing safetensors file, which any program may have written.

        Raises:
            CheckpointError: (a ValueError) the file is missing, is not a complete safetensors file, or has unknown
                dtypes.
        """
        from safetensors import SafetensorError, safe_open

        check_regular(path, "load")
        try:
            with safe_open(str(path), framework="np"):  # checks sizes and offsets against the file
                pass
        except (SafetensorError, OSError) as error:
            msg = f"load: {path} is missing or not a complete safetensors file: {error}"
            raise CheckpointError(msg) from error
        with path.open("rb") as file:
            start = file.read(8)
            text = file.read(int.from_bytes(start, "little"))
        table = json.loads(text)
        table.pop("__metadata__", None)
        if unknown := [f"{name} ({each['dtype']})" for name, each in table.items() if each["dtype"] not in _DTYPES]:
            msg = f"load: {path} has dtypes that are not supported: {', '.join(unknown)}"
            raise CheckpointError(msg)
        entries = {name: Entry(each["dtype"], tuple(each["shape"])) for name, each in table.items()}
        offsets = {name: each["data_offsets"][0] for name, each in table.items()}
        return cls(path, entries, (start + text, offsets))

    def create(self) -> None:
        """Create the file with its header, and room for all tensors."""
        with self.path.open("xb") as file:
            file.write(self._header)
            file.truncate(self.size)

    def check(self) -> None:
        """Check size and header, and map the file: from then on its tensors can be read even if it is deleted.

        Raises:
            CheckpointError: (a ValueError) the file is missing, truncated, or not the one of the index.
        """
        if not self.path.is_file() or self.path.stat().st_size != self.size:
            msg = f"load: {self.path} is missing or truncated; its index expects {self.size} bytes"
            raise CheckpointError(msg)
        if self._content[: len(self._header)].tobytes() != self._header:
            msg = f"load: {self.path} is not the file that its index describes"
            raise CheckpointError(msg)

    def write(self, parts: Sequence[tuple[str, Box, np.ndarray[Any, Any]]]) -> list[tuple[str, Piece]]:
        """Write parts to the disk, each given as name, box and values; return name, box and checksum of each."""
        written: list[tuple[str, Piece]] = []
        if not parts:
            return written
        with self.path.open("rb+") as file:
            several = [part for part in parts if not self._write_run(file.fileno(), *part)]
            if several:
                content = self._mapped("r+")
                for name, box, values in several:
                    self._part(content, name, box)[...] = values
                content.flush()
            os.fsync(file.fileno())
        return [(name, (box, checksum(values))) for name, box, values in parts]

    def _write_run(self, file: int, name: str, box: Box, values: np.ndarray[Any, Any]) -> bool:
        """Write a box whose bytes are contiguous in the file, such as a shard of dim 0; return False for others.

        This is faster than writing through a memory map, which reads every page first.
        """
        entry = self.entries[name]
        lengths = [high - low for low, high in box]
        sharded = next((dim for dim, length in enumerate(lengths) if length != 1), len(lengths))
        if values.dtype != entry.dtype or lengths[sharded + 1 :] != list(entry.shape[sharded + 1 :]):
            return False
        item, first = entry.dtype.itemsize, 0
        for (low, _), length in zip(box, entry.shape, strict=True):
            first = first * length + low
        place, rest = len(self._header) + self._offsets[name] + first * item, _as_bytes(values)
        while rest:
            count = os.pwrite(file, rest, place)
            place, rest = place + count, rest[count:]
        return True

    def view(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """Return a part of a tensor as a read-only array, mapped from the file."""
        return self._part(self._content, name, box)

    @cached_property
    def _content(self) -> np.memmap[Any, Any]:
        return self._mapped("r")

    def _mapped(self, mode: Any) -> np.memmap[Any, Any]:
        import numpy as np

        return np.memmap(self.path, np.uint8, mode)

    def _part(self, content: np.ndarray[Any, Any], name: str, box: Box) -> np.ndarray[Any, Any]:
        entry, start = self.entries[name], len(self._header) + self._offsets[name]
        whole = content[start : start + entry.size].view(entry.dtype).reshape(entry.shape)
        index: tuple[Any, ...] = (*(slice(low, high) for low, high in box), ...)  # a view, of 0-d tensors too
        part: np.ndarray[Any, Any] = whole[index]
        return part


def checksum(values: np.ndarray[Any, Any]) -> int:
    """Return the CRC-32 of the bytes of ``values`` in row-major order."""
    return zlib.crc32(_as_bytes(values))


def _as_bytes(values: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of ``values`` in row-major order; a copy only if they are not in that order."""
    import numpy as np

    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _header(entries: dict[str, Entry]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of the file, and where each tensor begins after them; larger elements come first."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        offsets[name], end = end, end + entry.size
        table[name] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint's index.

    Attributes:
        files: files with the tensors.
        tree: the values; None in a folder that another program has written.
        pieces: parts of each tensor, as they were written; none in a folder that another program has written.
        ties: further names of tied tensors, each with the name under which the tensor is stored.
    """

    files: tuple[DataFile, ...]
    tree: Any
    pieces: dict[str, list[Piece]]
    ties: dict[str, str]

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """All tensors by name."""
        return {name: entry for file in self.files for name, entry in file.entries.items()}

    def file_of(self, name: str) -> DataFile:
        """Return the file that has the tensor ``name``."""
        return next(file for file in self.files if name in file.entries)


def write_index(folder: Path, data: DataFile, tree: Any, pieces: dict[str, list[Piece]], ties: dict[str, str]) -> None:
    """Replace the index atomically by one of ``data``, the values of ``tree`` and the checksums of ``pieces``."""
    ours = {
        "version": VERSION,
        "file": data.path.name,
        "tree": tree,
        "ties": ties,
        "tensors": {name: [entry.code, entry.shape, pieces[name]] for name, entry in data.entries.items()},
    }
    ours["checksum"] = _text_checksum(ours)
    total = sum(entry.size for entry in data.entries.values())
    weight_map = dict.fromkeys(data.entries, data.path.name)
    index = {"metadata": {"total_size": total, "hyper_parallel": ours}, "weight_map": weight_map}
    atomic_write_text(folder / INDEX, json.dumps(index))


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint of ``save``, or of safetensors files that another program has written.

    Raises:
        FileNotFoundError: there is no checkpoint in ``folder``.
        CheckpointError: (a ValueError) the index is damaged, of a newer version, or names a file outside the folder.
    """
    path = folder / INDEX
    if not path.exists() and (folder / _SINGLE).exists():
        return Index((DataFile.existing(folder / _SINGLE),), None, {}, {})
    check_regular(path, "load")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
        ours = index.get("metadata", {}).get("hyper_parallel")
        version = None if ours is None else ours["version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"load: {path} is not the index of a checkpoint"
        raise CheckpointError(msg) from error
    if ours is None:
        _check_names(path, names)
        if any(_OWN_FILE.fullmatch(name) for name in names):
            msg = f"load: {path} is damaged: it names a data file of save, but does not list its tensors"
            raise CheckpointError(msg)
        files = tuple(DataFile.existing(folder / name) for name in names)
        counts = Counter(name for file in files for name in file.entries)
        if several := sorted(name for name, count in counts.items() if count > 1):
            msg = f"load: {', '.join(several)} is in several of the files that {path} names"
            raise CheckpointError(msg)
        return Index(files, None, {}, {})
    if version != VERSION:
        msg = f"load: {path} has version {version}; this release reads version {VERSION}"
        raise CheckpointError(msg)
    try:
        data, tree, pieces, ties = _contents(folder, ours)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"load: {path} is damaged: {error}"
        raise CheckpointError(msg) from error
    _check_names(path, [ours["file"]])
    return Index((data,), tree, pieces, ties)


def _contents(folder: Path, ours: dict[str, Any]) -> tuple[DataFile, Any, dict[str, list[Piece]], dict[str, str]]:
    """Return data file, tree, pieces and ties of an index of ``save``; a malformed index raises any kind of error."""
    if unknown := sorted(set(ours) - _KEYS):
        msg = f"it has unknown entries {unknown}"
        raise ValueError(msg)
    without = {key: value for key, value in ours.items() if key != "checksum"}
    if "checksum" in ours and ours["checksum"] != _text_checksum(without):
        msg = "its checksum differs"
        raise ValueError(msg)
    entries, pieces = {}, {}
    for name, (code, shape, written) in ours["tensors"].items():
        if code not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
            msg = f"{name} is {code}{shape}"
            raise ValueError(msg)
        entries[name] = Entry(code, tuple(shape))
        pieces[name] = [(_box_in(name, box, shape), crc) for box, crc in written]
    ties = ours.get("ties", {})
    if not all(isinstance(name, str) for name in ties.values()):
        msg = f"its ties are {ties}"
        raise ValueError(msg)
    if not _is_tree(ours["tree"]):
        msg = "its values are not those of a state"
        raise ValueError(msg)
    return DataFile(folder / ours["file"], entries), ours["tree"], pieces, ties


def _box_in(name: str, box: Any, shape: Sequence[int]) -> Box:
    """Return the box of a piece.

    Raises:
        ValueError: the box is not within a tensor of ``shape``.
    """
    edges = tuple((low, high) for low, high in box)
    for (low, high), size in zip(edges, shape, strict=True):
        if type(low) is not int or type(high) is not int or not 0 <= low <= high <= size:
            msg = f"the piece {box} of {name} is not within its shape {list(shape)}"
            raise ValueError(msg)
    return edges


def _is_tree(tree: Any) -> bool:
    """Return whether ``tree`` has the form of a nested state: each node is a dictionary of its kind and its content."""
    if tree is None:
        return True
    if not isinstance(tree, dict) or len(tree) != 1:
        return False
    ((kind, content),) = tree.items()
    if kind in {"tensor", "value"}:
        return kind == "value" or isinstance(content, str)
    if kind not in {"items", "list", "tuple"} or not isinstance(content, list):
        return False
    if kind != "items":
        return all(_is_tree(inner) for inner in content)
    pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in content)
    return pairs and all(not isinstance(key, (list, dict)) and _is_tree(inner) for key, inner in content)


def _check_names(path: Path, names: Sequence[Any]) -> None:
    """Check that an index names files in its own folder.

    Raises:
        CheckpointError: a name is a path, or not a string that can name a file.
    """
    for name in names:
        if not isinstance(name, str) or name in {"", ".", ".."} or set(name) & set("/\\\0") or not name.isprintable():
            msg = f"load: {path} names the file {name!r}; only files in its own folder are read"
            raise CheckpointError(msg)


def _text_checksum(ours: dict[str, Any]) -> int:
    """Return the CRC-32 of an index's entries on tensors and values."""
    return zlib.crc32(json.dumps(ours).encode())

"""``save``: all ranks write their shards of a state into one checkpoint at once."""

from __future__ import annotations

import json
import uuid
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.checkpoint.folder import DataFile, Entry, Piece, code_of, write_index
from hyper_parallel.core.checkpoint.names import FolderNames
from hyper_parallel.core.checkpoint.state import Flat, platform_of_state
from hyper_parallel.core.dtensor.boxes import intersect, whole_box
from hyper_parallel.errors import CheckpointError, CheckpointWriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.checkpoint.names import Link, Names
    from hyper_parallel.core.dtensor.layout import Box
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["linked_parts", "own_box", "save", "together"]


def save(state: Any, folder: str | Path, *, names: Names | None = None) -> None:
    """Write a checkpoint that :func:`load` reads on any mesh; all ranks of the world call this together.

    Every rank writes its shards, and none gathers a tensor. Values that are not sharded are those of rank 0. A
    checkpoint in ``folder`` is replaced once the new one is complete. Tied parameters are written once.

    Args:
        state: a module, an optimizer or any object with ``state_dict`` and ``load_state_dict``, a tensor, a plain
            value, or a dictionary, list or tuple of these. Tensors are named by their paths: a module alone has the
            names of its own state dict.
        folder: of the checkpoint, on a file system that all ranks share; it is created.
        names: what tensors are named in the folder: names of the state, or leading parts of them, and their
            replacements; a ``*`` on both sides stands for the same text. With :class:`Blocks` a tensor is cut into
            several, with :class:`Block` several become one. The first key that matches a name applies.

    Raises:
        CheckpointError: (a ValueError) the state holds something else, or differs between ranks, or ``names`` do not
            fit it.
        CheckpointWriteError: (an OSError) the disk refuses; a checkpoint that was there is unchanged.
    """
    platform, folder = platform_of_state(state), Path(folder)
    flat = Flat(state, platform)
    named = FolderNames(names, {name: _entry(name, value) for name, value in flat.tensors.items()}, flat.ties)
    if named.problems:
        msg = f"save: {'; '.join(named.problems)}"
        raise CheckpointError(msg)
    entries = named.entries
    facts = [[(name, entry.code, entry.shape) for name, entry in entries.items()], named.ties]
    digest = zlib.crc32(json.dumps(facts).encode())
    proposals = platform.transport().all_gather_object((digest, uuid.uuid4().hex), _everyone(platform))
    differing = [rank for rank, (other, _) in enumerate(proposals) if other != proposals[0][0]]
    if differing:
        msg = f"save: the tensors of ranks {differing} have other names, dtypes or shapes than those of rank 0"
        raise CheckpointError(msg)
    data = DataFile(folder / f"data-{proposals[0][1]}.safetensors", entries)
    try:
        together(platform, lambda: _create(data) if platform.get_rank() == 0 else None, CheckpointWriteError)
        written = together(platform, lambda: data.write(_parts(platform, flat.tensors, named)), CheckpointWriteError)
        pieces: dict[str, list[Piece]] = {name: [] for name in entries}
        for name, piece in (each for rank in written for each in rank):
            pieces[name].append(piece)
        publish = partial(write_index, folder, data, flat.tree, pieces, named.ties)
        together(platform, publish if platform.get_rank() == 0 else _nothing, CheckpointWriteError)
    except BaseException:
        if platform.get_rank() == 0:
            data.path.unlink(missing_ok=True)
        raise
    if platform.get_rank() == 0:
        for old in folder.glob("data-*.safetensors"):
            if old != data.path:
                old.unlink(missing_ok=True)


def together(platform: Platform, act: Callable[[], Any], kind: type[Exception]) -> list[Any]:
    """Return what ``act`` returns on all ranks; if it raises on one, all raise ``kind``."""
    try:
        result, failure = act(), None
    except (OSError, CheckpointError) as error:
        result, failure = None, str(error)
    results = platform.transport().all_gather_object((result, failure), _everyone(platform))
    failures = {rank: text for rank, (_, text) in enumerate(results) if text is not None}
    if failures:
        first = min(failures)
        raise kind(f"{failures[first]} (on ranks {sorted(failures)})")
    return [value for value, _ in results]


def own_box(value: Any) -> Box:
    """Return the part of the whole tensor that this rank holds of ``value``."""
    box: Box = value.layout.local_box() if hasattr(value, "full_tensor") else whole_box(value.shape)
    return box


def _everyone(platform: Platform) -> tuple[int, ...]:
    return tuple(range(platform.get_world_size()))


def _nothing() -> None:
    """What ranks other than the first do."""


def _create(data: DataFile) -> None:
    data.path.parent.mkdir(parents=True, exist_ok=True)
    data.create()


def _entry(name: str, value: Any) -> Entry:
    if hasattr(value, "full_tensor") and value.layout.partials:
        msg = f"save: {name} is a DTensor {value.layout.notation(value.dtype)}; reduce it first, with reduce_partial()"
        raise CheckpointError(msg)
    return Entry(code_of(name, value.dtype), tuple(value.shape))


def linked_parts(links: Sequence[Link], box: Box) -> list[tuple[str, Box, tuple[Any, ...]]]:
    """Return the non-empty parts of ``box`` in a tensor of the state: name and box in the folder, index in ``box``."""
    parts = []
    for name, inner, shift in links:
        common = intersect(box, inner)
        if all(low < high for low, high in common):
            there = tuple((low + step, high + step) for (low, high), step in zip(common, shift, strict=True))
            index = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(common, box, strict=True))
            parts.append((name, there, (*index, ...)))  # a view, of 0-d tensors too
    return parts


def _parts(platform: Platform, tensors: dict[str, Any], named: FolderNames) -> list[tuple[str, Box, Any]]:
    """Return name, box and values of what this rank writes: of equal boxes, one of the ranks that hold it."""
    parts: list[tuple[str, Box, Any]] = []
    rank = platform.get_rank()
    for name, value in tensors.items():
        box, holders = own_box(value), [0]
        if hasattr(value, "full_tensor"):
            if rank not in value.layout.mesh.ranks:
                continue
            holders = [each for each in value.layout.mesh.ranks if value.layout.local_box(each) == box]
        if holders[zlib.crc32(name.encode()) % len(holders)] == rank:
            local = value.to_local() if hasattr(value, "full_tensor") else value
            array = platform._to_host(platform.detach(local))  # noqa: SLF001 - of the contract
            parts += [(there, part, array[index]) for there, part, index in linked_parts(named.links[name], box)]
    return parts

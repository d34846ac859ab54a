"""``save``: all ranks write their shards of a state into one checkpoint at once."""

from __future__ import annotations

import json
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.checkpoint.folder import DataFile, Entry, Piece, code_of, write_index
from hyper_parallel.core.checkpoint.names import FolderNames
from hyper_parallel.core.checkpoint.state import Flat, platform_of_state
from hyper_parallel.core.dtensor.boxes import intersect, whole_box
from hyper_parallel.errors import CheckpointError, CheckpointWriteError
from hyper_parallel.platform.contract.safetensors_file import unusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from hyper_parallel.core.checkpoint.names import Link, Names
    from hyper_parallel.core.dtensor.layout import Box
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["PendingSave", "all_ranks_or_raise", "async_save", "is_outside", "linked_parts", "own_box", "save"]

Part = tuple[str, "Box", "np.ndarray[Any, Any]"]
"""Name and box in the folder, and values."""


def save(state: Any, folder: str | Path, *, names: Names | None = None) -> None:
    """Write a checkpoint that :func:`load` reads on any mesh; all ranks of the world call this together.

    Every rank writes its shards, and none gathers a tensor. Values that are not sharded are those of rank 0. A
    checkpoint in ``folder`` is replaced once the new one is complete. Tied parameters are written once.

    Args:
        state: a module, an optimizer or any object with ``state_dict`` and ``load_state_dict``, a tensor, a plain
            value, or a dictionary, list or tuple of these. Tensors are named by their paths: a module alone has the
            names of its own state dict. A run resumes from ``{"model": model, "optimizer": optimizer, "step": step,
            "random": get_rng_state()}``.
        folder: folder of the checkpoint, on a file system that all ranks share; it is created.
        names: names of tensors in the folder: maps names of the state, or leading parts of them, to their
            replacements; a ``*`` on both sides stands for the same text. With :class:`Blocks` a tensor is cut into
            several, with :class:`Block` several become one. The first key that matches a name applies.

    Raises:
        CheckpointError: (a ValueError) the state holds a value of another type, or differs between ranks, or ``names``
            does not match it.
        CheckpointWriteError: (an OSError) the disk cannot be written; an earlier checkpoint is unchanged.
    """
    writing = _Writing(state, Path(folder), names)
    writing.publish(lambda: writing.data.write(writing.parts()))


def async_save(state: Any, folder: str | Path, *, names: Names | None = None) -> PendingSave:
    """Begin to write a checkpoint as :func:`save` does, while training goes on; all ranks call this together.

    The state is copied to the host before this returns, so it may be changed afterwards. A thread writes the copy; the
    checkpoint is there once :meth:`PendingSave.wait` returns, and until then ``folder`` has the earlier one.

    Args:
        state: as for :func:`save`.
        folder: as for :func:`save`.
        names: as for :func:`save`.

    Returns:
        the save, for which all ranks must wait before the next one in ``folder`` begins.

    Raises:
        CheckpointError: (a ValueError) as for :func:`save`.
        CheckpointWriteError: (an OSError) the file cannot be created.
    """
    writing = _Writing(state, Path(folder), names)
    return PendingSave(writing, [(name, box, values.copy()) for name, box, values in writing.parts()])


class PendingSave:
    """A checkpoint that a thread is writing; made by :func:`async_save`."""

    def __init__(self, writing: _Writing, parts: list[Part]) -> None:
        self._writing: _Writing | None = writing
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._written = self._executor.submit(writing.data.write, parts)
        self._executor.shutdown(wait=False)

    def done(self) -> bool:
        """Return True once this rank's part is on the disk; other ranks may still be writing."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until all ranks have written, and replace the earlier checkpoint; all ranks call this together.

        Raises:
            CheckpointWriteError: (an OSError) the disk could not be written on a rank, or another save in the folder
                has finished since this one began; the earlier checkpoint is unchanged.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.publish(self._written.result)


class _Writing:
    """A checkpoint whose data file exists but is not in the index yet.

    Args:
        state: as in :func:`save`.
        folder: folder of the checkpoint.
        names: as in :func:`save`.
    """

    def __init__(self, state: Any, folder: Path, names: Names | None) -> None:
        self._platform = platform = platform_of_state(state)
        self._flat = flat = Flat(state, platform)
        self._named = FolderNames(names, {name: _entry(name, value) for name, value in flat.tensors.items()}, flat.ties)
        names_used = dict.fromkeys([*flat.tensors, *flat.ties, *self._named.entries, *self._named.ties])
        if problems := [*self._named.problems, *unusable(names_used)]:
            msg = f"save: {'; '.join(problems)}"
            raise CheckpointError(msg)
        self._is_first = platform.get_rank() == 0
        self.data = DataFile(folder / f"data-{self._agreed_name()}.safetensors", self._named.entries)
        with self._removing():
            all_ranks_or_raise(platform, lambda: _create(self.data) if self._is_first else None, CheckpointWriteError)

    def _agreed_name(self) -> str:
        """Return a new name for the data file, after checking that all ranks save the same tensors."""
        facts = [[(name, each.code, each.shape) for name, each in self._named.entries.items()], self._named.ties]
        digest = zlib.crc32(json.dumps(facts).encode())
        everyone = _everyone(self._platform)
        proposals = self._platform.transport().all_gather_object((digest, uuid.uuid4().hex), everyone)
        differing = [rank for rank, (other, _) in enumerate(proposals) if other != proposals[0][0]]
        if differing:
            msg = f"save: the tensors of ranks {differing} differ from those of rank 0 in names, dtypes or shapes"
            raise CheckpointError(msg)
        name: str = proposals[0][1]
        return name

    def parts(self) -> list[Part]:
        """Return the parts that this rank writes."""
        return _parts(self._platform, self._flat.tensors, self._named)

    def publish(self, write: Callable[[], list[tuple[str, Piece]]]) -> None:
        """Replace the index once ``write`` has returned on all ranks, and remove earlier data.

        Raises:
            CheckpointWriteError: (an OSError) the disk cannot be written on a rank.
        """
        platform, data = self._platform, self.data
        with self._removing():
            written = all_ranks_or_raise(platform, lambda: self._present(write), CheckpointWriteError)
            pieces: dict[str, list[Piece]] = {name: [] for name in data.entries}
            for name, piece in (each for rank in written for each in rank):
                pieces[name].append(piece)
            all_ranks_or_raise(
                platform, lambda: self._replace_index(pieces) if self._is_first else None, CheckpointWriteError
            )
        if self._is_first:
            for old in data.path.parent.glob("data-*.safetensors"):
                if old != data.path:
                    old.unlink(missing_ok=True)

    def _replace_index(self, pieces: dict[str, list[Piece]]) -> None:
        self._present(self.data.path.stat)
        write_index(self.data.path.parent, self.data, self._flat.tree, pieces, self._named.ties)

    def _present(self, act: Callable[[], Any]) -> Any:
        """Return the result of ``act``; raise CheckpointWriteError if the data file was removed meanwhile."""
        try:
            return act()
        except FileNotFoundError as error:
            msg = (
                f"save: {self.data.path} was removed: another save in this folder finished after this one began; wait "
                "for each save before the next begins"
            )
            raise CheckpointWriteError(msg) from error

    @contextmanager
    def _removing(self) -> Iterator[None]:
        """Remove the data file if the body raises."""
        try:
            yield
        except BaseException:
            if self._is_first:
                self.data.path.unlink(missing_ok=True)
            raise


def all_ranks_or_raise(platform: Platform, act: Callable[[], Any], kind: type[Exception]) -> list[Any]:
    """Return the results of ``act`` on all ranks; if it raises on one, all raise ``kind``."""
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
    """Return the box of ``value`` that this rank holds."""
    box: Box = value.layout.local_box() if hasattr(value, "full_tensor") else whole_box(value.shape)
    return box


def is_outside(value: Any) -> bool:
    """Return whether ``value`` is a DTensor on a mesh that this rank is outside of."""
    return hasattr(value, "full_tensor") and value.layout.mesh.coordinate is None


def _everyone(platform: Platform) -> tuple[int, ...]:
    return tuple(range(platform.get_world_size()))


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


def _parts(platform: Platform, tensors: dict[str, Any], named: FolderNames) -> list[Part]:
    """Return name, box and values of what this rank writes: one of the ranks that hold a box writes it."""
    parts: list[Part] = []
    rank = platform.get_rank()
    for name, value in tensors.items():
        if is_outside(value):
            continue
        box, holders = own_box(value), [0]
        if hasattr(value, "full_tensor"):
            holders = [each for each in value.layout.mesh.ranks if value.layout.local_box(each) == box]
        if holders[zlib.crc32(name.encode()) % len(holders)] == rank:
            local = value.to_local() if hasattr(value, "full_tensor") else value
            array = platform._to_host(platform.detach(local))  # noqa: SLF001 - of the contract
            parts += [(there, part, array[index]) for there, part, index in linked_parts(named.links[name], box)]
    return parts

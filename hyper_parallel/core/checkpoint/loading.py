"""``load``: a checkpoint is checked completely, then every rank reads its own shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.checkpoint.folder import Entry, checksum, code_of, read_index
from hyper_parallel.core.checkpoint.names import FolderNames
from hyper_parallel.core.checkpoint.saving import all_ranks_or_raise, is_outside, linked_parts, own_box
from hyper_parallel.core.checkpoint.state import Flat, merge, name_of, platform_of_state, subtree
from hyper_parallel.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.checkpoint.folder import Index
    from hyper_parallel.core.checkpoint.names import Link, Names
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Compatibility", "load"]


class Compatibility:
    """How the tensors of a state are found in a checkpoint.

    Args:
        named: the state's tensors as they are named in the folder.
        index: index of the checkpoint.

    Attributes:
        stored: per tensor of ``named``, the name under which the checkpoint stores it.
        problems: all differences between the state and the checkpoint.
    """

    def __init__(self, named: FolderNames, index: Index) -> None:
        self.stored: dict[str, str] = {}
        self.problems = list(named.problems)
        self._saved, self._ties = index.entries, index.ties
        aliases: dict[str, list[str]] = {}
        for alias, name in named.ties.items():
            aliases.setdefault(name, []).append(alias)
        for name in named.entries:
            self._find(name, aliases.get(name, []))
        self.problems += self._only_saved(named)
        for name, entry in named.entries.items():
            self._compare(name, entry)

    def _find(self, name: str, aliases: list[str]) -> None:
        places = {path: self._ties.get(path, path) for path in [name, *aliases]}
        present = {path: place for path, place in places.items() if place in self._saved}
        if not present:
            self.problems.append(f"{name} is not in the checkpoint")
        elif len(set(present.values())) > 1:
            self.problems.append(f"{', '.join(present)} are tied in the state, but not in the checkpoint")
        else:
            self.stored[name] = next(iter(present.values()))

    def _only_saved(self, named: FolderNames) -> list[str]:
        users: dict[str, list[str]] = {}
        for name, place in self.stored.items():
            users.setdefault(place, []).append(name)
        known = {*self.stored.values(), *named.entries, *named.ties}
        return [
            *[f"{name} is only in the checkpoint" for name in [*self._saved, *self._ties] if name not in known],
            *[
                f"{', '.join(names)} are tied in the checkpoint, but not in the state"
                for names in users.values()
                if names[1:]
            ],
        ]

    def _compare(self, name: str, entry: Entry) -> None:
        saved = self._saved.get(self.stored.get(name, ""))
        if saved is not None and saved != entry:
            facts = f"{entry.code}{list(entry.shape)}, saved as {saved.code}{list(saved.shape)}"
            self.problems.append(f"{name} is {facts}")


def load(state: Any, folder: str | Path, *, names: Names | None = None) -> Any:
    """Fill ``state`` from a checkpoint of :func:`save`; all ranks of the world call this together.

    Every rank reads its own shards, in the layouts of ``state``: these, the mesh and the number of ranks may differ
    from those that saved. Everything is checked before anything is changed. Tied parameters stay tied. Apart from the
    state, memory holds one shard at a time.

    Safetensors files that another program has written load as well, a single file or several with an index. They have
    no checksums, and plain values of the state stay unchanged.

    Args:
        state: a state like the one that was saved. Tensors are written in place, objects with ``load_state_dict`` load
            theirs, and plain values are returned.
        folder: folder of the checkpoint.
        names: names of tensors in the folder, as for :func:`save`.

    Returns:
        the state, with the saved values instead of plain values; modules appear as dictionaries of tensors.

    Raises:
        CheckpointError: (a ValueError) there is no complete checkpoint in ``folder``, it is damaged, or names, shapes
            or dtypes do not match ``state``. One message has all differences, on every rank.
    """
    platform, folder = platform_of_state(state), Path(folder)
    indices: list[Index] = []
    all_ranks_or_raise(platform, lambda: indices.append(read_index(folder)), CheckpointError)
    index = indices[0]
    flat = Flat(state, platform, index.entries)
    entries = {name: Entry(code_of(name, value.dtype), tuple(value.shape)) for name, value in flat.tensors.items()}
    named = FolderNames(names, entries, flat.ties)
    fit = Compatibility(named, index)
    subtrees = {path: subtree(index.tree, path) for path in flat.objects}
    absent = [f"the checkpoint has no value at {name_of(path)}" for path, tree in subtrees.items() if tree is None]
    all_ranks_or_raise(
        platform, lambda: _check([*_without_states(fit.problems, flat.unstepped), *absent], folder), CheckpointError
    )
    all_ranks_or_raise(platform, lambda: _check_data(platform, index), CheckpointError)
    for name, value in flat.tensors.items():
        if not is_outside(value):
            # One at a time, so that memory never holds more than the state and one tensor's shard.
            _write(platform, value, _shard(value, named.links[name], fit, index))
    for path, owner in flat.objects.items():
        owner.load_state_dict(merge(subtree(flat.tree, path), subtrees[path], flat.tensors))
    return merge(flat.tree, index.tree, flat.tensors)


def _shard(value: Any, links: Sequence[Link], fit: Compatibility, index: Index) -> Any:
    """Read this rank's shard of ``value``, a tensor of the state, into memory of its own."""
    import numpy as np

    box = own_box(value)
    dtype = index.entries[fit.stored[links[0].name]].dtype
    array = np.empty([high - low for low, high in box], dtype)
    for stored_as, part, where in linked_parts(links, box):
        stored = fit.stored[stored_as]
        array[where] = index.file_of(stored).view(stored, part)
    return array


def _write(platform: Platform, value: Any, array: Any) -> None:
    values = platform._from_host(array)  # noqa: SLF001 - of the contract
    if hasattr(value, "full_tensor"):
        platform.update_param_data(value, platform.wrap(values, value.layout))
    else:
        platform.fill_(platform.detach(value), values)


def _without_states(problems: list[str], unstepped: list[str]) -> list[str]:
    """Return the differences; those in the state of an optimizer that has not stepped are merged into one."""
    for name in unstepped:
        start = f"{name}.state." if name else "state."
        others = [problem for problem in problems if not problem.startswith(start)]
        if len(others) < len(problems):
            owner = name or "the state"
            hint = f"{owner} is the state dict of an optimizer that has not stepped; give the optimizer itself"
            problems = [*others, hint]
    return problems


def _check(problems: list[str], folder: Path) -> None:
    """Raise CheckpointError with all differences, if there are any."""
    if problems:
        msg = f"load: the checkpoint in {folder} does not match the state: {'; '.join(problems)}"
        raise CheckpointError(msg)


def _check_data(platform: Platform, index: Index) -> None:
    """Check the data files, and the checksums of this rank's share of the pieces.

    Raises:
        CheckpointError: one is damaged.
    """
    for data in index.files:
        data.check()
    everything = [(name, box, crc) for name, written in index.pieces.items() for box, crc in written]
    for name, box, crc in everything[platform.get_rank() :: platform.get_world_size()]:
        data = index.file_of(name)
        if checksum(data.view(name, box)) != crc:
            msg = f"load: {name} in {data.path} is damaged: its checksum at {[list(edge) for edge in box]} differs"
            raise CheckpointError(msg)

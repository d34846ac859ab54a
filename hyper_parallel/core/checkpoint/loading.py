"""``load``: a checkpoint is checked as a whole, then every rank reads its own shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.checkpoint.folder import DataFile, Entry, Piece, checksum, code_of, read_index
from hyper_parallel.core.checkpoint.saving import own_box, together
from hyper_parallel.core.checkpoint.state import Flat, build, platform_of_state
from hyper_parallel.errors import CheckpointError

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["load"]


def load(state: Any, folder: str | Path) -> Any:
    """Fill ``state`` from a checkpoint of :func:`save`; all ranks of the world call this together.

    Every rank reads its own shards, in the layouts of ``state``: these, the mesh and the number of ranks may differ
    from those that saved. Everything is checked before anything is changed.

    Args:
        state: like the state that was saved. Tensors are written in place, objects with ``load_state_dict`` load
            theirs, and plain values are returned.
        folder: of the checkpoint.

    Returns:
        the state, with the saved values in the place of plain values; modules appear as dictionaries of tensors.

    Raises:
        CheckpointError: (a ValueError) there is no complete checkpoint in ``folder``, it is damaged, or names, shapes
            or dtypes do not fit ``state``: all differences in one message, on every rank.
    """
    platform, folder = platform_of_state(state), Path(folder)
    index: list[Any] = []
    together(platform, lambda: index.append(read_index(folder)), CheckpointError)
    data, tree, pieces = index[0]
    flat = Flat(state, platform, data.entries)
    together(platform, lambda: _check(flat.tensors, data.entries, folder), CheckpointError)
    together(platform, lambda: _check_data(platform, data, pieces), CheckpointError)
    subtrees: list[Any] = []
    together(platform, lambda: subtrees.extend(_subtree(tree, name) for name in flat.objects), CheckpointError)
    parts = [(name, own_box(value)) for name, value in flat.tensors.items()]
    arrays: list[Any] = []
    together(platform, lambda: arrays.extend(data.read(parts)), CheckpointError)
    for value, array in zip(flat.tensors.values(), arrays, strict=True):
        _write(platform, value, platform._from_host(array))  # noqa: SLF001 - of the contract
    for owner, subtree in zip(flat.objects.values(), subtrees, strict=True):
        owner.load_state_dict(build(subtree, flat.tensors))
    return build(tree, flat.tensors)


def _write(platform: Platform, value: Any, values: Any) -> None:
    if hasattr(value, "full_tensor"):
        platform.update_param_data(value, platform.wrap(values, value.layout))
    else:
        platform.fill_(platform.detach(value), values)


def _check(tensors: dict[str, Any], entries: dict[str, Entry], folder: Path) -> None:
    """Check that names, shapes and dtypes are the saved ones.

    Raises:
        CheckpointError: with all differences.
    """
    problems = [f"{name} is not in the checkpoint" for name in tensors if name not in entries]
    problems += [f"{name} is only in the checkpoint" for name in entries if name not in tensors]
    for name, value in tensors.items():
        mine, saved = Entry(code_of(name, value.dtype), tuple(value.shape)), entries.get(name)
        if saved is not None and mine != saved:
            problems.append(f"{name} is {mine.code}{list(mine.shape)}, saved as {saved.code}{list(saved.shape)}")
    if problems:
        msg = f"load: the checkpoint in {folder} does not fit the state: {'; '.join(problems)}"
        raise CheckpointError(msg)


def _check_data(platform: Platform, data: DataFile, pieces: dict[str, list[Piece]]) -> None:
    """Check the data file, and the checksums of this rank's share of the pieces.

    Raises:
        CheckpointError: it is damaged.
    """
    data.check()
    everything = [(name, box, crc) for name, written in pieces.items() for box, crc in written]
    for name, box, crc in everything[platform.get_rank() :: platform.get_world_size()]:
        if checksum(data.read([(name, box)])[0]) != crc:
            msg = f"load: {name} in {data.path} is damaged: its checksum at {[list(edge) for edge in box]} differs"
            raise CheckpointError(msg)


def _subtree(tree: Any, name: str) -> Any:
    """Return the part of ``tree`` at the path ``name``, whose keys may contain dots."""
    if not name:
        return tree
    (kind, content), *_ = tree.items()
    pairs = content if kind == "items" else enumerate(content) if kind in {"list", "tuple"} else ()
    for key, value in pairs:
        if name == str(key) or name.startswith(f"{key}."):
            return _subtree(value, name.removeprefix(str(key)).removeprefix("."))
    msg = f"load: the checkpoint has nothing at {name}"
    raise CheckpointError(msg)

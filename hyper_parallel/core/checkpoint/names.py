"""Maps names of the state to different names in the folder: renamed tensors, and tensors that are fused on one side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hyper_parallel.core.checkpoint.folder import Entry
from hyper_parallel.core.dtensor.boxes import whole_box
from hyper_parallel.errors import CheckpointError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box

__all__ = ["Block", "Blocks", "FolderNames", "Link", "Names"]


@dataclass(frozen=True)
class Blocks:
    """A tensor of the state that is several tensors in the folder, such as a fused QKV or gate-up weight.

    Attributes:
        names: names of the tensors in the folder, in the order in which the fused tensor holds them.
        sizes: relative sizes of the blocks, such as elements along ``dim``, numbers of heads, or 1 for each of equal
            blocks.
        dim: the dim along which the fused tensor holds them one after another.
        groups: number of times the blocks alternate along ``dim``: 1 for [q, k, v], the number of groups of heads for
            [q0, k0, v0, q1, k1, v1, ...], the number of rows for gate and up in alternating rows.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            CheckpointError: (a ValueError) sizes are not positive, or not one per name.
        """
        _check_blocks(self.sizes, self.groups)
        if len(self.names) != len(self.sizes):
            msg = f"Blocks: {len(self.names)} names need {len(self.names)} sizes, got {self.sizes}"
            raise CheckpointError(msg)


@dataclass(frozen=True)
class Block:
    """A tensor of the state that is a block of a fused tensor in the folder; the state has all blocks of it.

    Attributes:
        name: name of the fused tensor.
        index: index of the block.
        sizes: as for :class:`Blocks`.
        dim: as for :class:`Blocks`.
        groups: as for :class:`Blocks`.
    """

    name: str
    index: int
    sizes: tuple[int, ...]
    dim: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            CheckpointError: (a ValueError) sizes are not positive, or no block has the index.
        """
        _check_blocks(self.sizes, self.groups)
        if not 0 <= self.index < len(self.sizes):
            msg = f"Block: index {self.index} is not one of the {len(self.sizes)} blocks of {self.name}"
            raise CheckpointError(msg)


Names = Mapping[str, "str | Blocks | Block"]
"""Maps names in the state, or their leading parts, to the folder; ``*`` stands for the same text on both sides."""


class Link(NamedTuple):
    """A part of a tensor of the state, and its position in a tensor of the folder.

    Attributes:
        name: name of the tensor in the folder.
        box: the part's box in the tensor of the state.
        shift: per dim, the offset from an index in the state to the index in the folder.
    """

    name: str
    box: Box
    shift: tuple[int, ...]


class FolderNames:
    """The mapping of a state's tensors to those of the folder.

    Args:
        names: the map; the first key that matches a name applies; a name without a match is unchanged.
        entries: tensors of the state.
        ties: tied names of the state.

    Attributes:
        links: per tensor of the state, the parts of tensors in the folder that make it up.
        entries: tensors of the folder.
        ties: tied names of the folder.
        problems: reasons why the map does not match the state; empty if it does.
    """

    def __init__(self, names: Names | None, entries: Mapping[str, Entry], ties: Mapping[str, str]) -> None:
        self._names = dict(names or {})
        self._used: set[str] = set()
        self.problems: list[str] = []
        self.links: dict[str, tuple[Link, ...]] = {}
        self.entries: dict[str, Entry] = {}
        self.ties: dict[str, str] = {}
        self._users: dict[str, list[tuple[str, Block | None]]] = {}
        for name, entry in entries.items():
            self._link(name, entry, self._target(name))
        for name, users in self._users.items():
            self._check_users(name, users)
        for alias, first in ties.items():
            self._tie(alias, first)
        unused = [key for key in self._names if key not in self._used]
        self.problems += [f"the key {key!r} of names matches no tensor of the state" for key in unused]

    def _target(self, name: str) -> str | Blocks | Block:
        for key, target in self._names.items():
            match = re.match(_expression(key), name)
            if match is None:
                continue
            self._used.add(key)
            texts, rest = match.groups()[:-1], match.groups()[-1]
            if isinstance(target, Blocks):
                filled = tuple(self._fill(key, part, texts, rest) for part in target.names)
                return Blocks(filled, target.sizes, target.dim, target.groups)
            if isinstance(target, Block):
                filled_name = self._fill(key, target.name, texts, rest)
                return Block(filled_name, target.index, target.sizes, target.dim, target.groups)
            return self._fill(key, target, texts, rest)
        return name

    def _fill(self, key: str, target: str, texts: tuple[str, ...], rest: str) -> str:
        pieces = target.split("*")
        if len(pieces) - 1 != len(texts):
            self.problems.append(f"names: {key!r} and {target!r} do not have the same number of *")
            return target
        filled = "".join(text for pair in zip(pieces, (*texts, ""), strict=True) for text in pair)
        rest = rest.removeprefix(".")
        return f"{filled}.{rest}" if filled and rest else filled or rest

    def _link(self, name: str, entry: Entry, target: str | Blocks | Block) -> None:
        if isinstance(target, str):
            self._add(name, entry, target, None)
            self.links[name] = (Link(target, whole_box(entry.shape), (0,) * len(entry.shape)),)
            return
        parts, dim = sum(target.sizes), target.dim
        own = parts if isinstance(target, Blocks) else target.sizes[target.index]
        if not 0 <= dim < len(entry.shape) or entry.shape[dim] % (own * target.groups):
            whose = f"blocks of {target.sizes}" if isinstance(target, Blocks) else f"block {target.index}"
            groups = f" in {target.groups} groups" if target.groups > 1 else ""
            self.problems.append(f"dim {dim} of {name}, of shape {list(entry.shape)}, is not {whose}{groups}")
            return
        unit = entry.shape[dim] // (own * target.groups)
        if isinstance(target, Block):
            self._add(name, _resized(entry, dim, unit * parts * target.groups), target.name, target)
            runs = _runs(unit, target.sizes, target.groups, target.index)
            self.links[name] = tuple(
                _link_of(target.name, entry, dim, inner, outer, size) for outer, inner, size in runs
            )
            return
        links = []
        for index, (part, size) in enumerate(zip(target.names, target.sizes, strict=True)):
            self._add(name, _resized(entry, dim, unit * size * target.groups), part, None)
            runs = _runs(unit, target.sizes, target.groups, index)
            links += [_link_of(part, entry, dim, outer, inner, size) for outer, inner, size in runs]
        self.links[name] = tuple(links)

    def _add(self, name: str, entry: Entry, target: str, block: Block | None) -> None:
        if self.entries.setdefault(target, entry) != entry:
            other = self._users[target][0][0]
            self.problems.append(f"{other} and {name} give {target} different shapes or dtypes")
        self._users.setdefault(target, []).append((name, block))

    def _check_users(self, name: str, users: list[tuple[str, Block | None]]) -> None:
        blocks = [block for _, block in users if block is not None]
        if not blocks and len(users) == 1:
            return
        first = blocks[0] if blocks else None
        is_whole = (
            first is not None
            and len(blocks) == len(users)
            and sorted(block.index for block in blocks) == list(range(len(first.sizes)))
            and len({(block.sizes, block.dim, block.groups) for block in blocks}) == 1
        )
        if not is_whole:
            states = ", ".join(user for user, _ in users)
            self.problems.append(f"{states} do not cover each element of {name} in the folder exactly once")

    def _tie(self, alias: str, first: str) -> None:
        target, links = self._target(alias), self.links.get(first, ())
        if not isinstance(target, str) or len(links) != 1 or target == links[0].name:
            return
        if target in self.entries:
            self.problems.append(f"{alias} is tied to {first}, but names maps {target} to another tensor")
            return
        self.ties[target] = links[0].name


def _check_blocks(sizes: tuple[int, ...], groups: int) -> None:
    if not sizes or min(sizes) < 1 or groups < 1:
        msg = f"sizes of blocks and groups must be positive, got sizes {sizes}, groups {groups}"
        raise CheckpointError(msg)


def _expression(key: str) -> str:
    """Return a regular expression for names that begin with ``key``; groups are the texts of ``*``, and the rest."""
    inner = "([^.]+)".join(re.escape(text) for text in key.split("*"))
    return rf"{inner}(|\..+)$" if key else r"(.+)$"


def _resized(entry: Entry, dim: int, size: int) -> Entry:
    shape = list(entry.shape)
    shape[dim] = size
    return Entry(entry.code, tuple(shape))


def _runs(unit: int, sizes: tuple[int, ...], groups: int, index: int) -> list[tuple[int, int, int]]:
    """Return, for each run of a block, its start in the fused tensor, its start in the block, and its length."""
    before, length = unit * sum(sizes[:index]), unit * sizes[index]
    return [(group * unit * sum(sizes) + before, group * length, length) for group in range(groups)]


def _link_of(name: str, entry: Entry, dim: int, start: int, start_in_folder: int, size: int) -> Link:
    box, shift = list(whole_box(entry.shape)), [0] * len(entry.shape)
    box[dim], shift[dim] = (start, start + size), start_in_folder - start
    return Link(name, tuple(box), tuple(shift))

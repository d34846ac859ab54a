"""Declarations of placements, for values whose placement cannot be read from the tensor or inferred from its numbers.

A declaration maps a pattern of names to words: ``{"layers.*.wq.weight": "shard(0) over tp"}``. The words are

- ``replica``: every rank has the complete value;
- ``shard(DIM) over AXIS``, or ``over AXIS, AXIS``: the ranks have consecutive shards of a dim, in the order of the
ranks, with the first axis varying slowest; the sizes are those of the ranks' values;
- ``pending sum over AXIS``, or ``over AXIS, AXIS``: the ranks' values add up to the value;
- ``local``: the value is local to each rank and is not compared;

or several joined by ``and``: ``shard(0) over dp and pending sum over tp``. Names are matched with or without the kind
in front: ``output layers.0``. The first matching pattern is used.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Declaration", "declaration_of", "names_value", "parse_declaration"]

_SHARD = re.compile(r"shard\((-?\d+)\) over (.+)")
_PENDING = re.compile(r"pending sum over (.+)")


@dataclass(frozen=True)
class Declaration:
    """The declared placement of a value on a rank.

    Attributes:
        shards: dims of the tensor with the axes over which they are sharded.
        pending: axes over which a sum is pending.
        local: whether the value is local to the rank.
        words: text of the declaration.
    """

    shards: tuple[tuple[int, tuple[str, ...]], ...] = ()
    pending: tuple[str, ...] = ()
    local: bool = False
    words: str = "replica"


def parse_declaration(words: str, axes: Collection[str] | None) -> Declaration:
    """Return the declaration that ``words`` express.

    Args:
        words: as described in the module's docstring.
        axes: names of the program's axes; None while they are unknown: any name is accepted.

    Raises:
        ValueError: the words are not a declaration, or name an axis that the program does not have.
    """
    shards: list[tuple[int, tuple[str, ...]]] = []
    pending: tuple[str, ...] = ()
    parts = [part.strip() for part in words.split(" and ")]
    for part in parts:
        if shard := _SHARD.fullmatch(part):
            shards.append((int(shard[1]), _axes(shard[2], words, axes)))
        elif reduction := _PENDING.fullmatch(part):
            pending += _axes(reduction[1], words, axes)
        elif part not in {"replica", "local"} or len(parts) > 1:
            raise ValueError(
                f"the declaration {words!r} cannot be read; write 'replica', 'shard(0) over tp', 'pending sum over "
                "tp', 'local', or shards and sums joined by ' and '"
            )
    return Declaration(tuple(shards), pending, words == "local", words)


def declaration_of(kind: str, name: str, declared: Mapping[str, Declaration]) -> Declaration | None:
    """Return the first declaration whose pattern matches the name, or the kind and the name; None if there is none."""
    return next((line for pattern, line in declared.items() if names_value(pattern, kind, name)), None)


def names_value(pattern: str, kind: str, name: str) -> bool:
    """Return whether a pattern matches the name of a value, or its kind and name."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f"{kind} {name}", pattern)


def _axes(text: str, words: str, axes: Collection[str] | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if axes is not None and name not in axes:
            raise ValueError(f"the declaration {words!r} names axis {name!r}; the program has {', '.join(axes)}")
    return names

"""Folds rows of repeated layers: rows with equal columns whose paths differ only in the numbers of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Folded", "folded"]


@dataclass(frozen=True)
class Folded:
    """Rows that are equal for several layers.

    Attributes:
        path: path with ranges of numbers, such as ``blocks.0-11.up.weight``.
        rows: the folded rows, in the order of the layers.
    """

    path: str
    rows: tuple[Any, ...]


def folded(rows: Iterable[tuple[str, Hashable, Any]]) -> list[Folded]:
    """Return the rows, with those of repeated layers as one row at the position of the first.

    Args:
        rows: tuples of path, the data that must be equal in folded rows, and the row.
    """
    groups: dict[Hashable, list[tuple[list[int], Any]]] = {}
    for path, key, row in rows:
        parts = path.split(".")
        pattern = tuple(None if part.isdigit() else part for part in parts)
        groups.setdefault((pattern, key), []).append(([int(part) for part in parts if part.isdigit()], row))
    result = []
    for (pattern, _), members in groups.items():  # type: ignore[misc] # the keys are these pairs
        sizes = [len(set(column)) for column in zip(*(numbers for numbers, _ in members), strict=True)]
        if len(members) != math.prod(sizes):  # such as experts, if the numbers of experts differ between layers
            result += [Folded(_path(pattern, map(str, numbers)), (row,)) for numbers, row in members]
            continue
        columns = [_spans(sorted(set(column))) for column in zip(*(numbers for numbers, _ in members), strict=True)]
        result.append(Folded(_path(pattern, columns), tuple(row for _, row in members)))
    return result


def _path(pattern: Sequence[str | None], numbers: Iterable[str]) -> str:
    """Return the path with ``numbers`` inserted where ``pattern`` is None."""
    rest = iter(numbers)
    return ".".join(next(rest) if part is None else part for part in pattern)


def _spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, consecutive ones as a range: ``0-2,5``."""
    spans = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        spans.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(spans)

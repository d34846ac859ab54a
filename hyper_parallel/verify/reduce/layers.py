"""The pattern of a model's layers, and the fewest layers that have all of it on every pipeline stage."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Pattern", "fewest_layers", "frequencies", "frequency_text"]

_DENSE = 2
"""Leading dense layers that remain: the first one, and one that follows another."""


@dataclass(frozen=True)
class Pattern:
    """Which layers a model has.

    Attributes:
        layers: their number.
        dense: of these, the first that are dense where the others have experts.
        periods: after how many layers a kind of layer returns, by key.
        lists: the kind of each layer, by key.
    """

    layers: int
    dense: int
    periods: Mapping[str, int]
    lists: Mapping[str, Sequence[Any]]

    @property
    def period(self) -> int:
        """After how many layers everything repeats, as far as it does: irregular lists are left out."""
        kinds = (*self.periods.values(), *map(_period, self.lists.values()))
        return math.lcm(*(kind for kind in kinds if kind))

    @property
    def irregular(self) -> list[Sequence[Any]]:
        """Lists of layers that do not repeat."""
        return [kinds for kinds in self.lists.values() if not _period(kinds)]


def _period(kinds: Sequence[Any]) -> int:
    """Return the shortest period of a list that has it at least twice; 0 if there is none."""
    for period in range(1, len(kinds) // 2 + 1):
        if all(one == other for one, other in zip(kinds, kinds[period:], strict=False)):
            return period
    return 0


def fewest_layers(pattern: Pattern, stages: tuple[int, int]) -> Pattern:
    """Return a pattern of fewer layers that has every kind of layer.

    Every stage has a period of the pattern, and at least two layers; leading dense layers are at most two. The layers
    are divided evenly by the stages if they were.

    Args:
        pattern: of the large model.
        stages: pipeline stages of the large model, and of the small one.
    """
    big, small = stages
    start, length = _window(pattern)
    dense = max(pattern.dense - start, 0)
    layers = max(dense + length, small * length)
    while (layers % small == 0) != (pattern.layers % big == 0):
        layers += 1
    if layers >= pattern.layers:
        return pattern
    start = min(start, pattern.layers - layers)
    start -= start % pattern.period
    lists = {key: list(kinds[start : start + layers]) for key, kinds in pattern.lists.items()}
    return Pattern(layers, max(pattern.dense - start, 0), pattern.periods, lists)


def _window(pattern: Pattern) -> tuple[int, int]:
    """Return the first layer that remains, and how many follow the dense ones at least.

    Of irregular lists that is the shortest range with each kind of layer, and each kind next to each other kind.
    """
    start = max(pattern.dense - _DENSE, 0)
    start -= start % pattern.period
    if not pattern.irregular:
        return start, max(pattern.period, 2)
    kinds = list(zip(*pattern.lists.values(), strict=True))
    pairs = list(itertools.pairwise(kinds))
    found = [
        (length, first)
        for first in ([start] if pattern.dense else range(0, pattern.layers, pattern.period))
        for length in range(2, pattern.layers - first + 1)
        if set(pairs[first : first + length - 1]) == set(pairs)
    ]
    length, first = min(found, default=(pattern.layers - start, start))
    return first, length - max(pattern.dense - first, 0)


_RUNS = re.compile(r"\(?(\[\d\](\*\d+)?(\+\[\d\](\*\d+)?)*)\)?(\*\d+)?")


def frequencies(text: Any) -> list[int] | None:
    """Return the kinds of layers that Megatron's ``([0]*3+[1]*58)`` means; None if it is something else."""
    found = _RUNS.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
    if found is None:
        return None
    runs = [int(kind) for kind, times in re.findall(r"\[(\d)\](?:\*(\d+))?", found[1]) for _ in range(int(times or 1))]
    return runs * int((found[5] or "*1")[1:])


def frequency_text(kinds: Sequence[int]) -> str:
    """Return kinds of layers as Megatron writes them."""
    runs = [f"[{kind}]*{len(list(run))}" for kind, run in itertools.groupby(kinds)]
    return f"({'+'.join(runs)})"

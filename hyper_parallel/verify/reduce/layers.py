"""The pattern of a model's layers, and the fewest layers that contain it on every pipeline stage."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Pattern", "fewest_layers", "frequencies", "frequency_text"]

_DENSE = 2
"""Number of leading dense layers that are kept: the first one, and one that follows another."""


@dataclass(frozen=True)
class Pattern:
    """The kinds of a model's layers.

    Attributes:
        layers: number of layers.
        dense: number of leading layers that are dense while the others have experts.
        periods: number of layers after which a kind of layer repeats, by key.
        lists: the kind of each layer, by key.
    """

    layers: int
    dense: int
    periods: Mapping[str, int]
    lists: Mapping[str, Sequence[Any]]

    @property
    def period(self) -> int:
        """The number of layers after which the pattern repeats, without irregular lists."""
        kinds = (*self.periods.values(), *map(_period, self.lists.values()))
        return math.lcm(*(kind for kind in kinds if kind))

    @property
    def irregular(self) -> list[Sequence[Any]]:
        """Lists of layers that do not repeat."""
        return [kinds for kinds in self.lists.values() if not _period(kinds)]


def _period(kinds: Sequence[Any]) -> int:
    """Return the shortest period that a list contains at least twice; 0 if there is none."""
    for period in range(1, len(kinds) // 2 + 1):
        if all(one == other for one, other in zip(kinds, kinds[period:], strict=False)):
            return period
    return 0


def fewest_layers(pattern: Pattern, stages: tuple[int, int]) -> Pattern:
    """Return a pattern of fewer layers with every kind of layer.

    Every stage has at least two layers, and a complete period of the pattern, or as many layers as in the large model
    if that is less. There are at most two leading dense layers. The number of stages divides the number of layers if it
    does so in the large model. In that case, every stage starts with a new period only if it does so in the large
    model. Otherwise the small model would hide the bug of a stage that counts layers from its own first layer.

    Args:
        pattern: pattern of the large model.
        stages: numbers of pipeline stages of the large model and of the small one.
    """
    big, small = stages
    start, length = _window(pattern)
    dense = max(pattern.dense - start, 0)
    each, rest = divmod(pattern.layers, big)
    layers = max(dense + length, small * (length if rest else max(min(each, length), 2)))
    while (layers % small == 0) != (rest == 0) or (
        rest == 0 and (layers // small % pattern.period == 0) != (each % pattern.period == 0)
    ):
        layers += 1
    if layers >= pattern.layers:
        return pattern
    start = min(start, pattern.layers - layers)
    start -= start % pattern.period
    lists = {key: list(kinds[start : start + layers]) for key, kinds in pattern.lists.items()}
    return Pattern(layers, max(pattern.dense - start, 0), pattern.periods, lists)


def _window(pattern: Pattern) -> tuple[int, int]:
    """Return the first layer that is kept, and the minimum number of layers after the dense ones.

    For irregular lists, this is the shortest range with each kind of layer and each pair of adjacent kinds.
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
    """Return the kinds of layers in Megatron's notation ``([0]*3+[1]*58)``; None for other texts."""
    found = _RUNS.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
    if found is None:
        return None
    runs = [int(kind) for kind, times in re.findall(r"\[(\d)\](?:\*(\d+))?", found[1]) for _ in range(int(times or 1))]
    return runs * int((found[5] or "*1")[1:])


def frequency_text(kinds: Sequence[int]) -> str:
    """Return kinds of layers in Megatron's notation."""
    runs = [f"[{kind}]*{len(list(run))}" for kind, run in itertools.groupby(kinds)]
    return f"({'+'.join(runs)})"

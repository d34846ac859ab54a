"""`--data`: checks that in each epoch all ranks together draw every sample of the training data once.

If a program repeats or omits samples on one rank and on several, both train alike, so comparing them does not expose
the error. This compares the indices that the samplers of data loaders return with the size of the dataset. Ranks that
draw the same indices in the same order count once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.engine.wording import numbered, ranks_words
from hyper_parallel.verify.frameworks.contract.records import DRAWS, LoaderPass, RankRecords, Run
from hyper_parallel.verify.program.report import HardenedCase

__all__ = ["compare_data"]

_NAMED = 4


class _Part(NamedTuple):
    """Ranks that draw the same samples in one epoch, and their pass over the loader."""

    ranks: tuple[int, ...]
    made: LoaderPass


def compare_data(run: Run) -> HardenedCase:
    """Return the case that lists epochs in which a sample is drawn twice or not at all.

    If the program leaves an epoch before its end, only repetitions are checked. Samples that fill up the last batches
    to equal sizes, and samples of a dropped incomplete last batch, are listed but are not errors.

    Args:
        run: run of the ranks, with the recorded passes over data loaders.
    """
    verdict, lines = Verdict(run.world_size), _Lines()
    streams = set()
    for (loader, number), passes in sorted(_passes(run).items()):
        made = next(iter(passes.values()))
        if not all(each.indexed for each in passes.values()):
            streams.add(f"samples of {made.dataset} have no indices, so that none can be recognized again")
            continue
        if made.replaces:
            streams.add(f"{made.sampler} draws samples of {made.dataset} with replacement")
            continue
        epoch = _Epoch(f"{made.dataset} of loader {loader + 1}", number + 1, _parts(passes), lines)
        verdict.counts["sample"] += epoch.drawn
        verdict.differences += epoch.differences()
    verdict.checked = verdict.counts["sample"]
    verdict.skipped = sorted(streams)
    if not verdict.checked:
        why = next(iter(streams), "the program trains with no sample of a data loader of PyTorch")
        return HardenedCase([], title="data", skipped=why, asked=True)
    return HardenedCase([*lines.text(), *_orders(run)], verdict, title="data")


class _Lines:
    """Lines about epochs; equal lines of several epochs are merged."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[str, str], list[int]] = {}

    def add(self, data: str, epoch: int, words: str) -> None:
        self._epochs.setdefault((data, words), []).append(epoch)

    def text(self) -> list[str]:
        return [f"{data}, {numbered('epoch', epochs)}: {words}" for (data, words), epochs in self._epochs.items()]


def _trained(rank: RankRecords) -> Iterator[LoaderPass]:
    """Yield the passes of a rank over samples that train its model."""
    notes: list[LoaderPass] = rank.notes.get(DRAWS, [])
    return (made for made in notes if made.trains and made.indices)


def _passes(run: Run) -> dict[tuple[int, int], dict[int, LoaderPass]]:
    """Return the passes over data loaders, by loader and number of the pass, then by rank."""
    passes: dict[tuple[int, int], dict[int, LoaderPass]] = {}
    for rank in run.ranks:
        for made in _trained(rank):
            passes.setdefault((made.loader, made.number), {})[rank.rank] = made
    return passes


def _parts(passes: Mapping[int, LoaderPass]) -> list[_Part]:
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for rank, made in passes.items():
        ranks.setdefault(tuple(made.indices), []).append(rank)
    return [_Part(tuple(same), passes[same[0]]) for same in ranks.values()]


@dataclass
class _Epoch:
    """The samples that the ranks draw in one epoch.

    Attributes:
        data: the dataset and its loader, in words.
        number: number of the epoch, from 1.
        parts: groups of ranks that draw the same samples, with these samples.
        lines: object to which findings that are not errors are added.
    """

    data: str
    number: int
    parts: Sequence[_Part]
    lines: _Lines

    def __post_init__(self) -> None:
        self.times = Counter(index for part in self.parts for index in part.made.indices)
        self.drawn = self.times.total()
        self.complete = all(part.made.complete for part in self.parts)
        size = self.parts[0].made.size
        self.lost = 0 if size is None or not self.complete else max(0, size - len(self.times))
        samples = f"{len(self.times)} samples" if size is None else f"{len(self.times)} of {size} samples"
        by = " and ".join(ranks_words(part.ranks) for part in self.parts[:2])
        by += f" and {len(self.parts) - 2} more parts" if len(self.parts) > 2 else ""
        self._add(f"{samples}, drawn by {by}{'' if self.complete else '; the program leaves it before its end'}")

    def differences(self) -> list[Difference]:
        """Return samples that are drawn several times or never, unless the sampler does this to make batches equal."""
        return [*self._repeated(), *self._lost()]

    def _repeated(self) -> list[Difference]:
        again = [index for index, count in self.times.items() if count > 1]
        if not again:
            return []
        made = self.parts[0].made
        last = {index for part in self.parts for index in part.made.indices[-part.made.last :]}
        batch = sum(part.made.last for part in self.parts)
        even = self.complete and len({len(part.made.indices) for part in self.parts}) == 1 < len(self.parts)
        if even and not self.lost and len(again) < batch and last >= {*again}:
            self._add(f"{made.sampler} draws {_samples(len(again))} twice, to fill up the last batches of equal parts")
            return []
        holders = [part for part in self.parts if again[0] in part.made.indices]
        evidence = f"{made.sampler or 'the loader'} draws sample {again[0]} {self.times[again[0]]} times"
        if len(holders) > 1:
            evidence = (
                f"sample {again[0]} is drawn by {' and by '.join(ranks_words(each.ranks) for each in holders[:2])}"
            )
        why = f"{_samples(len(again))} drawn more than once in one epoch: {_listed(again)}"
        return [self._difference(holders, Cause("samples-repeated", evidence=evidence), why)]

    def _lost(self) -> list[Difference]:
        if not self.lost:
            return []
        batch = max(sum(part.made.last for part in self.parts), len(self.parts))
        if all(part.made.drops for part in self.parts) and self.lost < batch:
            self._add(f"{_samples(self.lost)} left out with an incomplete last batch")
            return []
        size = self.parts[0].made.size or 0
        missing = [index for index in range(size) if index not in self.times]
        evidence = f"the ranks draw {self.drawn} times, {len(self.times)} different samples; the dataset has {size}"
        why = f"{_samples(self.lost)} drawn by no rank, although the epoch has come to its end: {_listed(missing)}"
        return [self._difference(self.parts, Cause("samples-lost", evidence=evidence), why)]

    def _add(self, words: str) -> None:
        self.lines.add(self.data, self.number, words)

    def _difference(self, parts: Sequence[_Part], cause: Cause, why: str) -> Difference:
        made, ranks = parts[0].made, sorted(rank for part in parts for rank in part.ranks)
        name = f"{self.data}, epoch {self.number}"
        return Difference(
            "sample", name, "", tuple(ranks), made.step, 0, math.inf, 0.0, why, cause=cause, site=made.site
        )  # fmt: skip


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _listed(indices: Sequence[Any]) -> str:
    more = f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else ""
    return f"{', '.join(map(str, indices[:_NAMED]))}{more}"


def _orders(run: Run) -> list[str]:
    """Return a line if a sampler shuffles but all epochs have the same order, because `set_epoch` is not called."""
    for rank in run.ranks:
        orders: dict[int, list[LoaderPass]] = {}
        for made in _trained(rank):
            if made.complete and made.reorders:
                orders.setdefault(made.loader, []).append(made)
        for passes in orders.values():
            if len(passes) > 1 and all(each.indices == passes[0].indices for each in passes):
                which = f"all {len(passes)} epochs have the same order on rank {rank.rank}"
                return [f"{passes[0].sampler} shuffles, and {which}: call its set_epoch(epoch) before each"]
    return []

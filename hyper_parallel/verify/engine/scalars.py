"""Compares losses and other single numbers, which may be replicated, or a mean or sum over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.distance import Distance, distance
from hyper_parallel.verify.engine.matching import rows_of
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.wording import value_words

__all__ = ["combinations_of_ranks", "compare_scalars", "rows_of_rank"]


def compare_scalars(runs: PairedRuns, key: Key, notes: list[str]) -> dict[int, Distance | None]:
    """Return, by rank, the distance of a loss from the reference's, alone or in the first combination that is right.

    Args:
        runs: both runs.
        key: key of the loss, or of an output that is a single number.
        notes: a list to which a sentence about how the ranks' values were combined is added once.
    """
    expected, allowed = np.asarray(runs.bounds.reference[key].value), runs.bounds.allowed(key)
    plain = {rank: distance(runs.value(key, rank), expected, allowed) for rank in runs.holders(key)}
    numbers = _numbers(runs, key)
    if all(plain[rank].ratio <= 1 for rank in numbers) or expected.dtype.kind != "f":
        return dict(plain)
    equal = len({value.tobytes() for value in numbers.values()}) == 1
    for words, values in (*combinations_of_ranks(runs, key), *_weighted_by_masks(runs, key)):
        if equal and words.startswith("sum"):
            continue  # equal numbers are not summands: each is the global value divided by the number of ranks
        results = {rank: distance(value, expected, allowed) for rank, value in values.items()}
        if all(result.ratio <= 1 for result in results.values()):
            note = f"{value_words(key[0], key[1])} is compared as the {words} of the ranks' values"
            if note not in notes:
                notes.append(note)
            return {**plain, **results}
    return dict(plain)


def combinations_of_ranks(runs: PairedRuns, key: Key) -> Iterator[tuple[str, Mapping[int, Any]]]:
    """Yield possible combinations of the ranks' numbers, in words, with the result on each rank that has a number."""
    values = _numbers(runs, key)
    if len({value.shape for value in values.values()}) > 1:
        return
    for axis, groups in runs.axes.sets():
        groups_of = {rank: [other for other in group if other in values] for group in groups for rank in group}
        chosen = {rank: groups_of.get(rank, [rank]) for rank in values}
        for words, combine in (("mean", np.mean), ("sum", np.sum)):
            yield (
                f"{words} over {axis}",
                {
                    rank: np.asarray(combine([values[other] for other in members], axis=0)).astype(values[rank].dtype)
                    for rank, members in chosen.items()
                },
            )
        weights = {rank: rows_of_rank(runs, rank, key[2]) for rank in values}
        if all(weights.values()):
            yield (
                f"mean over {axis}, weighted with the rows of each rank,",
                {
                    rank: np.asarray(
                        np.average([values[other] for other in members], weights=[weights[other] for other in members])
                    )
                    for rank, members in chosen.items()
                },
            )


def _weighted_by_masks(runs: PairedRuns, key: Key) -> Iterator[tuple[str, Mapping[int, Any]]]:
    """Yield the means of an output's numbers, weighted with the true elements of a mask that the same module returns.

    The module may average over these elements. The ranks' masks together must have as many true elements as the
    reference's mask.
    """
    module, values = runs.bounds.reference[key].module, _numbers(runs, key)
    for mask, record in runs.bounds.reference.items():
        if mask[0] != "output" or mask[2:] != key[2:] or record.module != module or record.value.dtype.kind != "b":
            continue
        counts = {rank: int(np.sum(runs.value(mask, rank))) for rank in runs.holders(mask) if rank in values}
        for axis, groups in runs.axes.sets():
            groups_of = {rank: group for group in groups for rank in group if set(group) <= set(counts)}
            if all(
                rank in groups_of and sum(counts[other] for other in groups_of[rank]) == int(np.sum(record.value))
                for rank in values
            ):
                yield (
                    f"mean over {axis}, weighted with the true elements of {mask[1]} on each rank,",
                    {
                        rank: np.asarray(
                            np.average([values[other] for other in group], weights=[counts[other] for other in group])
                        )
                        for rank, group in groups_of.items()
                    },
                )


def _numbers(runs: PairedRuns, key: Key) -> dict[int, Any]:
    """Return the numbers of ranks, without ranks that have a tensor instead, such as earlier stages of a pipeline."""
    size = np.size(runs.bounds.reference[key].value)
    values = {rank: runs.value(key, rank) for rank in runs.holders(key)}
    return {rank: value for rank, value in values.items() if value.size == size}


def rows_of_rank(runs: PairedRuns, rank: int, step: int) -> int:
    """Return a rank's number of batch rows in a step: the most frequent size of recognised shards; 0 if there is none.

    If no output of the step was recognised, the rows of the complete run are used.
    """
    votes: Counter[int] = Counter()
    for key in runs.bounds.reference:
        placement = runs.activations.of(key, rank) if key[2] == step and key[0] == "output" else None
        rows = (
            None if placement is None or placement.positions is None else rows_of(placement.positions, placement.shape)
        )
        votes.update(line.size for line, total in zip(rows or (), placement.shape if placement else (), strict=False)
                     if line.size != total)  # fmt: skip
    if votes:
        return votes.most_common(1)[0][0]
    known = {sizes: sum(counter.values()) for sizes, counter in runs.activations.rows[rank].items()}
    return max(known, key=lambda sizes: known[sizes])[1] if known else 0

"""Samples that only the ranks feed to their models: a different batch, or different data on some ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.wording import ranks_words
from hyper_parallel.verify.frameworks.contract.records import Run

__all__ = ["calls_of_first_step", "foreign_samples", "lost_samples", "other_batch", "rows_of_first_step"]


def other_batch(reference: Run, parallel: Run, name: str) -> str | None:
    """Return a description of the error if the ranks saw samples that the reference did not see; None otherwise.

    The rows of each input of the ranks' first call of a model are compared with those of all calls in the reference's
    first step. An input is skipped if the sizes of its rows differ, as for slices of sequences. It is also skipped if
    some ranks have their shard of the reference's batch: then the data of the remaining ranks is wrong.

    Args:
        reference: the run on one rank.
        parallel: the run on all ranks.
        name: name of the program.
    """
    known = rows_of_first_step(rank.notes for rank in reference.ranks)
    for key, rows in rows_of_first_step((rank.notes for rank in parallel.ranks), calls=1).items():
        if key not in known or not rows - known[key]:
            continue
        parts = [rows_of_first_step([rank.notes], calls=1).get(key, set()) for rank in parallel.ranks]
        per_rank = max(map(len, parts))
        if per_rank < len(known[key]) and any(part and part <= known[key] for part in parts):
            continue  # ranks share one batch, and some have their shard of it: the data of the others is wrong
        fix = (
            f"if its batch size of {per_rank} is per rank, give the reference the whole batch with --single-args and "
            "the script's own option, or divide the batch by WORLD_SIZE in the script; if ranks are to see the same "
            "samples, seed their data alike"
            if per_rank == len(known[key]) < len(rows)
            else "seed the data alike in both, and let each rank take its part of one global batch"
        )
        return (
            f"{name}: the reference is trained on a different batch from all ranks together, so they cannot agree: in "
            f"the first step one rank alone sees {len(known[key])} samples, the {parallel.world_size} ranks "
            f"{len(rows)} different ones, {len(rows - known[key])} of which the reference does not see; {fix}"
        )
    return None


def foreign_samples(runs: PairedRuns, key: Key) -> dict[int, int]:
    """Return, for ranks whose shard of an output is not recognised, how many input rows the reference does not have.

    Args:
        runs: both runs, with the inputs of models that the recorder noted.
        key: key of the output.
    """
    known = rows_of_first_step([runs.reference_notes])
    foreign: dict[int, int] = {}
    for rank in runs.holders(key):
        own = rows_of_first_step([runs.parallel.ranks[rank].notes])
        count = sum(len(rows - known[name]) for name, rows in own.items() if name in known)
        if count and runs.placement(key, rank) is None:
            foreign[rank] = count
    return foreign


def lost_samples(runs: PairedRuns) -> str:
    """Return text if ranks feed the same rows to their models, and some rows of the reference are on no rank."""
    own = [rows_of_first_step([rank.notes]) for rank in runs.parallel.ranks]
    for name, rows in rows_of_first_step([runs.reference_notes]).items():
        parts = [part.get(name, set()) for part in own]
        lost = rows.difference(*parts)
        same = [rank for rank, part in enumerate(parts) if part and parts.count(part) > 1]
        if lost and same:
            return (
                f"{ranks_words(same)} feed the same input rows to their models, and no rank feeds {len(lost)} of the "
                f"{len(rows)} rows that the single device does"
            )
    return ""


def calls_of_first_step(notes: Mapping[str, Any]) -> int:
    """Return how often a rank called its most frequently called model in the first step, not counting evaluations.

    Calls count as calls of the same model if their inputs have the same names, numbers of dims and dtypes.
    """
    calls: dict[int, list[tuple[Any, ...]]] = {}
    for call, name, value in notes.get("inputs", ()):
        array = np.asarray(value)
        calls.setdefault(call, []).append((str(name), array.ndim, array.dtype.str))
    return max(Counter(tuple(sorted(inputs)) for inputs in calls.values()).values(), default=0)


def rows_of_first_step(
    notes: Iterable[Mapping[str, Any]], calls: int | None = None
) -> dict[tuple[Any, Any, str], set[bytes]]:
    """Return the input rows of models in the first step, as bytes, by name of the input, shape of a row and dtype.

    Args:
        notes: notes of the ranks whose rows are joined.
        calls: number of calls of models whose inputs are used, from the first; None uses all calls that were noted.
    """
    rows: dict[tuple[Any, Any, str], set[bytes]] = {}
    for rank_notes in notes:
        for call, name, value in rank_notes.get("inputs", ()):
            array = np.asarray(value)
            if array.ndim and (calls is None or call < calls):
                known = rows.setdefault((name, array.shape[1:], array.dtype.str), set())
                known.update(np.ascontiguousarray(row).tobytes() for row in array)
    return rows

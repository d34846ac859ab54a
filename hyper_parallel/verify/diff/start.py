"""Compares the start of two runs: initial weights and first samples. If these differ, all later values differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hyper_parallel._text import near_hint
from hyper_parallel.verify.diff.alignment import CLOSE
from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.samples import calls_of_first_step, rows_of_first_step
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError

__all__ = ["require_common_names", "require_common_records", "start_differs"]

_MATCHED = ("weight", "gradient", "value", "call")
_TINY = float(np.finfo(np.float64).tiny)
_ROWS = 4096
"""Largest number of floating samples that are compared with each other."""


def require_common_records(runs: PairedRuns) -> None:
    """Check that two runs have recorded values with the same names.

    Raises:
        InputError: the runs have no name in common; the message lists the closest names.
    """
    require_common_names(runs.bounds.reference, [key for index in runs.ranks for key in index])


def require_common_names(first: Iterable[Key], second: Iterable[Key]) -> None:
    """Check that two runs, of which the keys are given, have a parameter or a recorded value in common.

    Raises:
        InputError: the runs have none in common; the message lists the closest names.
    """
    known, own = ({key[:2] for key in keys if key[0] in _MATCHED} for keys in (first, second))
    if own & known:
        return
    ours, theirs = ([*dict.fromkeys(name for _, name in sorted(names))] for names in (known, own))
    hint = next(filter(None, (near_hint(name, theirs) for name in ours)), "")
    msg = (
        f"A and B share no parameter and no recorded value, so nothing can be compared: A has "
        f"{', '.join(ours[:4]) or 'none'}; B has {', '.join(theirs[:4]) or 'none'}{hint}"
    )
    raise InputError(msg)


def start_differs(first: Run, runs: PairedRuns) -> Verdict | None:
    """Return a verdict if the runs start with different weights or samples; None if the start is the same.

    Args:
        first: run A on one rank, or joined from its ranks.
        runs: run A and run B, paired.
    """
    verdict = Verdict(runs.parallel.world_size, settings=dict(runs.parallel.settings))
    differences = _other_weights(runs) or _other_samples(first, runs.parallel)
    if not differences:
        return None
    verdict.differences = differences
    verdict.checked = sum(int(np.size(record.value)) for key, record in runs.bounds.reference.items() if key[2] < 0)
    verdict.skipped.append("everything after the start: the runs do not start alike, so all of it may differ")
    return verdict


def _other_weights(runs: PairedRuns) -> list[Difference]:
    """Return the initial weights that differ from A's; empty if the weights of B have different names."""
    found: list[Difference] = []
    keys = [key for key in runs.bounds.reference if key[0] in runs.parameters.KINDS and key[2] < 0]
    for key in keys:
        wrong: dict[int, str] = {}
        for rank in runs.holders(key):
            if (key[1], rank) in runs.parameters.strangers:
                shape, whole = runs.value(key, rank).shape, np.shape(runs.bounds.reference[key].value)
                wrong[rank] = f"{list(shape)} on rank {rank} is not a shard of A's {list(whole)}"
                continue
            distance = runs.distance(key, rank)
            if distance is not None and distance.ratio > 1:
                wrong[rank] = f"rank {rank} {distance.why}"
        if wrong:
            module = runs.bounds.reference[key].module
            why = next(iter(wrong.values()))
            found.append(Difference(key[0], key[1], module, tuple(wrong), -1, 0, np.inf, 0.0, why))
    if found:
        words = f"{len(found)} of {len(keys)} initial weights and buffers differ from A's"
        hint = "seed both runs alike, or load the same checkpoint in both"
        found[0] = replace(found[0], cause=Cause("other-weights", evidence=f"{words}; {hint}"))
    return found


def _other_samples(first: Run, second: Run) -> list[Difference]:
    """Return a list with a difference if models get different samples in the first step, else an empty list."""
    one, two = (rows_of_first_step(rank.notes for rank in run.ranks) for run in (first, second))
    for key, rows in one.items():
        if key not in two:
            continue
        missing, extra = _unmatched(rows, two[key], key[2]), _unmatched(two[key], rows, key[2])
        more = max(calls_of_first_step(rank.notes) for rank in second.ranks) - calls_of_first_step(first.ranks[0].notes)
        called_more_often = (more > 0 and not missing) or (more < 0 and not extra)  # only that run has extra ones
        if (missing or extra) and not called_more_often:
            words = (
                f"in the first step A's models see {len(rows)} different samples and B's {len(two[key])}: {missing} of "
                f"A's are not among B's, and {extra} of B's are not among A's"
            )
            hint = "seed the data of both runs alike, and give both the same global batch"
            cause = Cause("other-samples", evidence=f"{words}; {hint}")
            ranks = tuple(range(second.world_size))
            return [Difference("input", str(key[0]), "", ranks, 0, 0, np.inf, 0.0, words, cause=cause)]
    return []


def _unmatched(rows: set[bytes], others: set[bytes], dtype: str) -> int:
    """Return how many samples of ``rows`` equal no sample of ``others``, up to rounding."""
    alone = rows - others
    if np.dtype(dtype).kind != "f" or not alone or not others or len(rows) > _ROWS or len(others) > _ROWS:
        return len(alone)
    known = np.stack([np.frombuffer(row, dtype) for row in others]).astype(np.float64)
    allowed = CLOSE * max(float(np.abs(known).max(initial=0.0)), _TINY)
    return sum(
        not (np.abs(known - np.frombuffer(row, dtype)).max(axis=1, initial=0.0) <= allowed).any() for row in alone
    )

"""Joins the ranks of a run: every value as one array, as a run on one rank would have recorded it.

The positions of shards come from a run of the same program on one rank, called the map. The two runs are paired as in
any verification, so placements are determined in the same ways. The joined values are those of the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement
from hyper_parallel.verify.engine.scalars import combinations_of_ranks
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.frameworks.contract.records import DECISIONS, RankRecords, Record, Run

__all__ = ["put_together"]


def put_together(runs: PairedRuns, map_run: Run, sink: KeepSink) -> tuple[Run, list[Key]]:
    """Return the ranks of ``runs`` joined to a run on one rank, and the keys of values that could not be joined.

    Args:
        runs: the map as the reference, and the run on several ranks.
        map_run: the map, which is the run on one rank.
        sink: destination of the arrays.
    """
    alone, first = map_run.ranks[0], runs.parallel.ranks[0]
    records: list[Record] = []
    left_out: list[Key] = []
    for record in alone.records:
        if record.kind in DECISIONS:
            records.append(record)  # ties are ties on every rank, so the map's choices are kept
            continue
        value = _whole_value(runs, record.key) if runs.holders(record.key) else None
        if value is None:
            left_out.append(record.key)
        else:
            kept = sink.take(replace(record, value=value, region=None))
            records += [] if kept is None else [kept]
    notes = {**first.notes, "inputs": [each for rank in runs.parallel.ranks for each in rank.notes.get("inputs", ())]}
    return Run([RankRecords(0, records, [], notes)], dict(runs.parallel.settings)), left_out


def _whole_value(runs: PairedRuns, key: Key) -> Any | None:
    """Return a value of all ranks as one array; None if a shard's position is unknown or elements are on no rank."""
    known = runs.bounds.reference[key].value
    if not np.shape(known) and key[0] in ("loss", "norm", "rate", "output", "value"):
        return _number(runs, key)
    whole = np.empty(np.shape(known), known.dtype)
    covered = np.zeros(whole.size, dtype=bool)
    for rank in runs.holders(key):
        placement = runs.placement(key, rank)
        if placement is None or not placement.compared:
            return None
        if not covered.all():
            value = runs.actual(key, rank, placement)
            if value is None or not _put(whole, covered, placement, value):
                return None
    return whole if covered.all() else None


def _put(whole: Any, covered: Any, placement: Placement, value: Any) -> bool:
    """Write a rank's shard to its position; return whether it fits."""
    positions = placement.all_positions().reshape(-1)
    if placement.shape != whole.shape or positions.size != value.size:
        return False
    whole.reshape(-1)[positions] = value.reshape(-1)
    placement.mark(covered)
    return True


def _number(runs: PairedRuns, key: Key) -> Any:
    """Return the first rank's number, or a mean or sum of the ranks' numbers, whichever is nearest to the map's."""
    known = np.asarray(runs.bounds.reference[key].value)
    first = runs.value(key, runs.holders(key)[0])
    combined = [value for _, values in combinations_of_ranks(runs, key) for value in values.values()]
    candidates = [first, *combined] if first.dtype.kind == "f" else [first]
    off = [float(np.nan_to_num(abs(float(each) - float(known)), nan=np.inf)) for each in candidates]
    return np.asarray(candidates[int(np.argmin(off))], known.dtype)

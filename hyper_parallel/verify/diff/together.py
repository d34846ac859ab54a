"""Joins the values of a run's ranks: values that are equal on all ranks, and shards that make up a complete value.

Elements are joined if all of them are recorded. Otherwise, if the shards cover the value exactly once, the statistics
that a dump has of them are merged: norms, sums and extremes. Fingerprints of recordings are not merged, because their
projections are not additive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hyper_parallel._text import near_hint
from hyper_parallel.verify.engine.axes import Axes
from hyper_parallel.verify.engine.bounds import Key, index_records
from hyper_parallel.verify.engine.declared import Declaration, declaration_of, names_value, parse_declaration
from hyper_parallel.verify.engine.placement import Placement, ranks_along, region_placement
from hyper_parallel.verify.frameworks.contract.fingerprint import (
    LARGEST,
    LEAST,
    NORM,
    NOT_FINITE,
    SUM,
    Fingerprint,
    fingerprint_of,
)
from hyper_parallel.verify.frameworks.contract.records import Pending, RankRecords, Record, Region, Run
from hyper_parallel.verify.input_error import InputError

__all__ = ["alike_on_all_ranks", "with_declared"]


def with_declared(
    runs: Sequence[Run], declared: Mapping[str, str], meshes: Sequence[Mapping[str, int] | None]
) -> list[Run]:
    """Return runs whose records have the declared placements.

    Args:
        runs: A and B.
        declared: placements by pattern of names (:mod:`hyper_parallel.verify.engine.declared`). An axis that a run does
            not have is treated as an axis of one rank.
        meshes: for each run, the sizes of the axes; the last axis varies fastest.

    Raises:
        InputError: a mesh has a different number of ranks than its run, or a declaration cannot be read, names a dim
            that a value does not have, or matches no value.
    """
    try:
        axes = [Axes(run, mesh) for run, mesh in zip(runs, meshes, strict=True)]
        known = list(dict.fromkeys(axis for each in axes for axis in each.groups))
        lines = {pattern: parse_declaration(words, known) for pattern, words in declared.items()}
    except ValueError as error:
        raise InputError(str(error)) from None
    values = {record.key[:2] for run in runs for rank in run.ranks for record in rank.records}
    for pattern in lines:
        if not any(names_value(pattern, *value) for value in values):
            hint = near_hint(pattern, {name for _, name in values})
            msg = f"--declare {pattern}: no value of A or B has such a name{hint}"
            raise InputError(msg)
    return [_placed(run, lines, own) for run, own in zip(runs, axes, strict=True)] if lines else list(runs)


def _placed(run: Run, lines: Mapping[str, Declaration], axes: Axes) -> Run:
    indices = [index_records(rank.records) for rank in run.ranks]
    ranks: list[RankRecords] = []
    for rank, index in zip(run.ranks, indices, strict=True):
        records: list[Record] = []
        for key, record in index.items():
            line = declaration_of(key[0], key[1], lines)
            if line is None:
                records.append(record)
            elif not line.local:
                shapes = {number: other[key].value.shape for number, other in enumerate(indices) if key in other}
                records.append(replace(record, region=_region(line, key[1], rank.rank, shapes, axes)))
        ranks.append(replace(rank, records=records))
    return replace(run, ranks=ranks)


def _region(
    line: Declaration, name: str, rank: int, shapes: Mapping[int, tuple[int, ...]], axes: Axes
) -> Region | None:
    """Return the declared shard of a value on a rank; None for a replica."""
    total, start = list(shapes[rank]), [0] * len(shapes[rank])
    for dim, names in line.shards:
        if not -len(total) <= dim < len(total):
            msg = f"--declare {line.words!r} does not fit {name}, which has {len(total)} dims"
            raise InputError(msg)
        ranks = ranks_along(axes, [each for each in names if each in axes.groups], rank)
        sizes = [shapes[other][dim] if other in shapes else 0 for other in ranks]
        total[dim], start[dim] = sum(sizes), sum(sizes[: ranks.index(rank)])
    summed = [each for each in line.pending if each in axes.groups]
    ranks = ranks_along(axes, summed, rank)
    pending = (Pending("sum", ranks),) if len(ranks) > 1 else ()
    return Region(tuple(total), tuple(start), pending) if line.shards or pending else None


def alike_on_all_ranks(run: Run) -> tuple[list[Record], list[Key]]:
    """Return records that are equal on all ranks, or joined or merged from shards, and the keys of all others."""
    indices = [index_records(rank.records) for rank in run.ranks]
    alike: list[Record] = []
    own: list[Key] = []
    for key, record in {key: record for index in reversed(indices) for key, record in index.items()}.items():
        holders = [index[key] for index in indices if key in index]
        complete = record.region is None or (
            record.region.shape == record.value.shape and not record.region.pending and not record.region.spans
        )
        if complete and len(holders) == len(indices) and all(each.value.same(record.value) for each in holders):
            alike.append(replace(record, region=None))
        else:
            together = _together(holders)
            alike += [] if together is None else [together]
            own += [key] if together is None else []
    return alike, own


def _together(parts: Sequence[Record]) -> Record | None:
    """Return the complete value from the ranks' shards; None if elements or positions are unknown, or copies differ.

    Args:
        parts: shards of the ranks. Shards with a known position and all elements are joined; statistics are merged.
    """
    places: list[Placement] = []
    for part in parts:
        if part.region is None or part.region.pending:
            return None
        places.append(region_placement(part.region, part.value.shape))
    shape = places[0].shape
    if any(place.shape != shape for place in places):
        return None
    if any(part.value.whole is None for part in parts):
        return _merged(parts, shape)
    value, covered = np.zeros(shape, parts[0].value.whole.dtype), np.zeros(int(np.prod(shape)), dtype=bool)
    for place, part in zip(places, parts, strict=True):
        value.reshape(-1)[place.all_positions().reshape(-1)] = part.value.whole.reshape(-1)
        place.mark(covered)
    if not covered.all() or not all(map(_has_part, places, itertools.repeat(value), parts)):
        return None
    fingerprint = replace(fingerprint_of(value, parts[0].value.dtype), whole=value)
    return replace(parts[0], value=fingerprint, region=None)


def _has_part(place: Placement, value: Any, part: Record) -> bool:
    """Return whether a rank's shard equals its part of the joined value; a different copy may have replaced it."""
    own = part.value.whole
    return np.array_equal(place.take(value), own, equal_nan=own.dtype.kind in "fc")


def _merged(parts: Sequence[Record], shape: tuple[int, ...]) -> Record | None:
    """Return a value with the merged statistics of its shards; None for fingerprints, overlaps or gaps."""
    distinct: dict[tuple[int, ...], Fingerprint] = {}
    for part in parts:
        if part.region is None or part.region.spans:
            return None
        first = distinct.setdefault((*part.region.start, *part.value.shape), part.value)
        if not first.same(part.value):
            return None
    values = [each for each in distinct.values() if each.size]
    boxes = [box for box, each in distinct.items() if each.size]
    dims = range(len(shape))
    overlap = any(
        all(
            max(one[dim], two[dim]) < min(one[dim] + one[len(dims) + dim], two[dim] + two[len(dims) + dim])
            for dim in dims
        )
        for one, two in itertools.combinations(boxes, 2)
    )
    if overlap or sum(each.size for each in values) != math.prod(shape) or all(each.known is None for each in values):
        return None
    numbers = np.full_like(values[0].numbers, np.nan)
    known = [number for number in _MERGED if all(each.both_have(number, each) for each in values)]
    for number in known:
        numbers[number] = _MERGED[number]([each.numbers[number] for each in values])
    return replace(parts[0], value=Fingerprint(numbers, shape, values[0].dtype, known=tuple(known)), region=None)


_MERGED: Mapping[int, Any] = {
    NORM: np.linalg.norm, SUM: np.sum, LEAST: np.min, LARGEST: np.max, NOT_FINITE: np.sum,
}  # fmt: skip
"""Functions that merge the numbers of shards into the number of the complete value."""

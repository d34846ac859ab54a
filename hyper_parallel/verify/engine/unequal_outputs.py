"""Hypotheses about outputs that should be equal on ranks but are not: a missing sum, or shards that do not match."""

from __future__ import annotations

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.matching import rows_of
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.wording import ranks_words, value_words

__all__ = ["explain_unequal_outputs"]


def explain_unequal_outputs(runs: PairedRuns, key: Key, evidence: Evidence) -> Cause:
    """Return why ranks that should have the same output have different outputs, none of them the reference's."""
    return _unsummed_before(runs, key) or _mismatched_parts(runs, key) or _no_sum(evidence)


def _unsummed_before(runs: PairedRuns, key: Key) -> Cause | None:
    """Test whether the previous output is right only as a sum over ranks, and this output differs between them."""
    outputs = [other for other in runs.bounds.reference if other[0] == "output" and other[2:] == key[2:]]
    before = outputs[outputs.index(key) - 1] if key in outputs[1:] else None
    if before is None or not runs.holders(before):
        return None
    placements = [runs.placement(before, rank) for rank in runs.holders(before)]
    if any(placement is None or not placement.pending for placement in placements):
        return None
    group = next(iter(placement.pending[0] for placement in placements if placement is not None))
    axis = next((name for name, groups in runs.axes.sets() if group in groups), "")
    subject = value_words("output", before[1])
    text = f"{subject}, the one before, is the reference's only as a sum over {axis or ranks_words(group)}"
    return Cause("missing-reduction", axis, f"{text}, and ranks that should hold the same here do not")


def _no_sum(evidence: Evidence) -> Cause:
    """Return a cause without an explanation, with the sum or mean of outputs that is nearest to the reference."""
    found = []
    for axis, groups in evidence.runs.axes.sets():
        for words, mean in (("sum", False), ("mean", True)):
            off = []
            members = [(rank, group) for group in groups for rank in group if rank in evidence.ranks]
            for rank, group in members:
                total, _, count = evidence.combined(group)
                where = evidence.placements[rank].all_positions()
                rest = total[where] / (count[where] if mean else 1) - evidence.expected[rank]
                off.append(float(np.linalg.norm(rest)) / (float(np.linalg.norm(evidence.expected[rank])) or 1.0))
            if off:
                found.append((max(off), f"{words} over {axis}"))
    text = "ranks that should hold the same have different outputs, none of them the reference's"
    near = f"; nearest: the {min(found)[1]}, residual {100 * min(found)[0]:.2g} %" if found else ""
    return Cause("unexplained", "", f"{text}, and no sum or mean of them is it{near}")


def _mismatched_parts(runs: PairedRuns, key: Key) -> Cause | None:
    """Test whether a rank's shards of one module's weights do not match each other.

    Matching shards cover the same fraction of each weight: the second quarter of the queries goes with the second
    quarter, or the first half, of the keys.
    """
    module = key[1].partition(" (")[0].rpartition(".")[0]
    for rank in runs.holders(key):
        shares: dict[str, tuple[float, float]] = {}
        for name in runs.parameters.names():
            place = runs.parameters.of(name, rank) if name.startswith(f"{module}." if module else "") else None
            rows = None if place is None or place.positions is None else rows_of(place.positions, place.shape)
            for line, size in zip(rows or (), place.shape if place else (), strict=False):
                if 0 < line.size < size and line[-1] - line[0] == line.size - 1:
                    shares[name] = float(line[0]) / size, float(line[-1] + 1) / size
        for name, own in shares.items():
            for other, its in shares.items():
                if own[1] <= its[0]:
                    has = ", ".join(
                        f"the part from {100 * begin:.3g} to {100 * end:.3g} % of {which}"
                        for which, (begin, end) in ((name, own), (other, its))
                    )
                    return Cause("permuted", "", f"rank {rank} holds {has}: they do not belong together")
    return None

"""Hypotheses about values that only the ranks have: more losses in a step, additional weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.verdict import Difference
from hyper_parallel.verify.engine.wording import ranks_words

__all__ = ["skipped_step", "untied"]


def skipped_step(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    """Test whether ranks skipped an optimizer step after backward, so that a step has the losses of two steps.

    In total, the ranks have as many losses as the single device. Differences before the skipped step have other causes.
    """
    expected = _losses(runs.bounds.reference)
    found: dict[int, int] = {}
    for rank, index in enumerate(runs.ranks):
        own = _losses(index)
        if own.total() == expected.total():
            first = next((step for step in sorted(own) if own[step] > expected[step]), None)
            if first is not None and first <= key[2]:
                found[rank] = first
    if not found or not set(wrong[key].ranks) & set(found):
        return None
    rank, step = next(iter(found.items()))
    text = (
        f"{ranks_words(list(found))} {'has' if len(found) == 1 else 'have'} {_losses(runs.ranks[rank])[step]} losses "
        f"in step {step + 1} where the single device has {expected[step]}, and equally many in total: the optimizer "
        "skips its step after the first of them, as it does when gradients overflow"
    )
    return Cause("skipped-step", "", text)


def _losses(index: Mapping[Key, Any]) -> Counter[int]:
    return Counter(key[2] for key in index if key[0] == "loss")


def untied(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None) -> Cause | None:
    """Test whether a gradient lacks the gradient of a weight that only ranks have: the single device ties both."""
    if evidence is None or key[0] != "gradient" or set(evidence.ranks) != set(wrong[key].ranks):
        return None
    own = {other[1] for other in runs.ranks[evidence.ranks[0]] if other[0] == "weight"} if evidence.ranks else set()
    for name in sorted(own - set(runs.parameters.names())):
        errors = []
        for rank in evidence.ranks:
            record = runs.ranks[rank].get(("gradient", name, *key[2:]))
            actual = evidence.actual[rank]
            if record is None or np.shape(record.value) != actual.shape:
                break
            rest = np.asarray(record.value)
            fits, error = evidence.off(rank, actual + rest, np.abs(actual) + np.abs(rest))
            errors += [error] if fits and rest.any() else []
        if errors and len(errors) == len(evidence.ranks):
            text = f"with the gradient of {name}, a weight that only the ranks have, it equals the reference"
            return Cause("untied", "", f"{text} within {max(errors):.0e}; the single device has one weight for both")
    return None

"""Hypothesis: gradients are wrong from one module back to the first, although the forward is right."""

from __future__ import annotations

from collections.abc import Mapping

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.store import largest
from hyper_parallel.verify.engine.verdict import Difference

__all__ = ["wrong_way_back"]

_MOST = 0.5
"""Smallest share of earlier modules that must have wrong gradients, too: a wrong input gradient reaches all of them."""


def wrong_way_back(
    runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], evidence: Evidence | None
) -> Cause | None:
    """Test whether the gradients of later modules are right and those from a module back to the first are wrong.

    Sums and multiples of gradients are tested before. If none of them fits, the gradient that the module passes back is
    wrong although its output is right; for example, the backward of a collective is wrong.
    """
    kind, _, step, _ = key
    if kind != "gradient" or evidence is None or not evidence.ranks:
        return None
    if any(
        other[2] < step or (other[2] == step and other[0] in {"output", "value", "mask", "loss"}) for other in wrong
    ):
        return None
    places = _places(runs, step)
    off: dict[str, bool] = {}  # for each module with gradients in this step: whether one of them is wrong
    for other, record in runs.bounds.reference.items():
        if (other[0], *other[2:]) == ("gradient", step, key[3]) and record.module in places and runs.holders(other):
            off[record.module] = off.get(record.module, False) or other in wrong
    wrong_modules = [module for module, is_wrong in off.items() if is_wrong]
    if runs.bounds.reference[key].module not in wrong_modules:
        return None
    last = max(wrong_modules, key=places.__getitem__)
    after = [module for module in off if places[module] > places[last] and _has_gradient(runs, module, step)]
    before = [module for module in off if places[module] < places[last]]
    reached = [module for module in before if off[module]]
    if not before or len(reached) < _MOST * len(before):
        return None
    if not after:
        return _from_the_loss(runs, step, last, evidence) if all(off.values()) else None
    nearest = min(after, key=places.__getitem__)
    text = (
        f"every output that was compared is right, and so are the gradients of {nearest}; those of {last}, which runs "
        f"before it, are wrong, and of {len(reached)} of the {len(before)} modules before: look at the backward of "
        f"what uses the output of {last} up to {nearest}, or at what weights it in the loss"
    )
    return Cause("backward", "", text)


def _from_the_loss(runs: PairedRuns, step: int, last: str, evidence: Evidence) -> Cause | None:
    """Return the cause of gradients that are all wrong, equally on all ranks, although the loss is right."""
    losses = [key for key in runs.bounds.reference if key[0] == "loss" and key[2] == step and runs.holders(key)]
    if not losses or not evidence.replicated:
        return None
    text = (
        f"the outputs and the loss are right, and the gradients of every module, from {last} back, are wrong: look at"
    )
    return Cause("backward", "", f"{text} the backward from the loss to {last}, or at what reduces all gradients")


def _places(runs: PairedRuns, step: int) -> dict[str, int]:
    """Return the position of each module's last output in the forward of a step."""
    return {
        record.module: place
        for place, (key, record) in enumerate(runs.bounds.reference.items())
        if key[0] == "output" and key[2] == step and record.module
    }


def _has_gradient(runs: PairedRuns, module: str, step: int) -> bool:
    """Return whether a module has nonzero gradients, so that a right gradient is evidence."""
    return any(
        key[0] == "gradient" and key[2] == step and record.module == module and largest(record.value)
        for key, record in runs.bounds.reference.items()
    )

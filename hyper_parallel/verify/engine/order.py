"""The order in which differences are reported: the order of execution."""

from __future__ import annotations

from collections.abc import Mapping

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.verdict import Difference

__all__ = ["execution_order"]

_PHASES = {"norm": 2, "gradient": 1, "rate": 3, "state": 4, "weight": 5, "buffer": 6, "saved": 7}
"""Kinds of values after the forward; the forward's own values are in the order of recording."""


def execution_order(runs: PairedRuns, wrong: Mapping[Key, Difference]) -> list[Key]:
    """Return the keys of the differences, ordered by step: forward, backward in reverse, norm, optimizer, weights.

    Gradients that a function of the framework clips are recorded before the norm (call 0), and again when the optimizer
    reads them. If a program clips gradients itself, only the clipped gradients are recorded. The norm then comes before
    the gradients if it explains them: on each rank, every wrong gradient of that step is the reference's times the same
    factor. An optimizer that calls the model itself runs several forwards and backwards in a step. Then values are in
    the order of recording.
    """
    places: dict[Key, float] = {key: place for place, key in enumerate(runs.bounds.reference)}
    for index in runs.ranks:  # values that the reference does not have follow the value recorded before them
        before = -1.0
        for key in index:
            before = places.setdefault(key, before + 0.5) if key not in places else places[key]
    if "optimizers that call the model" in runs.reference_notes:
        return sorted(wrong, key=lambda key: (key[2], places.get(key, 0)))
    modules = _modules(runs, wrong, places)
    clipped = {step for step in {key[2] for key in wrong} if _norm_explains(runs, wrong, step)}

    def order(key: Key) -> tuple[int, float, float, float]:
        phase: float = _PHASES.get(key[0], 0)
        if key[0] == "norm" and key[2] in clipped:
            phase = 0.5
        if key[0] == "gradient" and key[3]:
            phase = 2.5
        place = places.get(key, 0)
        if key[0] == "gradient":  # backward reaches modules in reverse order, and all parameters of a module together
            return key[2], phase, -modules[_module(runs, wrong, key)], place
        return key[2], phase, 0.0, place

    return sorted(wrong, key=order)


def _modules(runs: PairedRuns, wrong: Mapping[Key, Difference], places: Mapping[Key, float]) -> dict[str, float]:
    """Return the position of each module's first gradient; -1 for modules without gradients."""
    modules: dict[str, float] = {}
    for key, record in runs.bounds.reference.items():
        if key[0] == "gradient":
            modules.setdefault(record.module, places[key])
    for difference in wrong.values():
        modules.setdefault(difference.module, -1.0)
    return modules


def _module(runs: PairedRuns, wrong: Mapping[Key, Difference], key: Key) -> str:
    return runs.bounds.reference[key].module if key in runs.bounds.reference else wrong[key].module


def _norm_explains(runs: PairedRuns, wrong: Mapping[Key, Difference], step: int) -> bool:
    """Return whether a wrong norm explains a step: wrong gradients are the reference's times one factor per rank."""
    norms = [key for key in wrong if key[0] == "norm" and key[2] == step]
    gradients = [key for key in wrong if key[0] == "gradient" and key[2] == step]
    clipped = any(key[0] == "gradient" and key[2] == step and key[3] for key in runs.bounds.reference)
    if not norms or clipped:
        return False
    factors: dict[int, list[float]] = {}
    for key in gradients:
        for rank in wrong[key].ranks:
            factor = runs.factor(key, rank)
            if factor is None:
                return False
            factors.setdefault(rank, []).append(factor)
    return all(max(known) - min(known) <= 1e-6 * abs(known[0]) for known in factors.values())

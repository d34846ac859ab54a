"""Hypothesis: an auxiliary loss of a router is computed from each rank's own tokens.

Such a loss balances the load of experts. It is not linear in the tokens, so the mean of the ranks' losses is not the
loss of all tokens. The known formulas are computed from the router's output, for the tokens of each rank and for all
tokens. One coefficient must then explain the differences of all elements of the gradient of the router's weight, and of
the loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.verdict import Difference

__all__ = ["own_tokens"]

_MOST_CHOSEN = 8
"""Largest number of experts per token that is tried."""

_MOST_EXPERTS = 1024
"""Largest size of the last dim of an output that may be a router's."""

_ENOUGH = 16
"""Number of gradient elements that must confirm the coefficient."""

_RESIDUAL = 0.05
"""Largest accepted fraction of the gradient's difference that the formula leaves unexplained."""

_Balance = Callable[[Any, Any], tuple[float, Any]]
"""A function that returns the load-balancing loss of probabilities, and its derivative with respect to their mean."""


@dataclass(frozen=True)
class _Router:
    """A router in a step of the reference.

    Attributes:
        key: key of the router's output.
        weight: name of the router's weight.
        scores: the output in float64, ``[tokens, experts]``.
        parts: indices of the tokens of each rank.
    """

    key: Key
    weight: str
    scores: Any
    parts: Mapping[int, Any]


@dataclass(frozen=True)
class _Fit:
    """How well a formula explains the gradient of a router's weight.

    Attributes:
        coefficient: factor of the formula that fits best.
        residual: fraction of the gradient's difference that the formula leaves unexplained.
        of_loss: by how much the loss should then differ.
    """

    coefficient: float
    residual: float
    of_loss: float


def own_tokens(runs: PairedRuns, key: Key, wrong: Mapping[Key, Difference], _evidence: Any) -> Cause | None:
    """Test whether a load-balancing loss of each rank's own tokens explains a wrong loss or a router's gradient."""
    found: tuple[float, str] | None = None
    for words, weight, fit in _candidates(runs, [*_routers(runs, key[2], wrong)]):
        if fit.residual > _RESIDUAL or (found is not None and found[0] <= fit.residual):
            continue
        if (key[0] == "loss" and not _explains_loss(runs, key, fit)) or (key[0] != "loss" and key[1] != weight):
            continue
        what = "loss and the gradient" if key[0] == "loss" else "gradient"
        text = (
            f"{fit.coefficient:.3g} times {words}, of each rank's own tokens instead of all, explains the {what} of "
            f"{weight} but for {100 * fit.residual:.2g} % of the difference; if this is meant, compute it on one rank "
            "for the same parts, or verify with a coefficient of 0"
        )
        found = (fit.residual, text)
    axes = [axis for axis, size in runs.axes.sizes().items() if size == runs.parallel.world_size]
    return None if found is None else Cause("auxiliary-loss", axes[0] if axes else "", found[1])


def _candidates(runs: PairedRuns, routers: list[_Router]) -> Iterator[tuple[str, str, _Fit]]:
    """Yield load-balancing losses in words, with the weight of the last router and how well the loss explains it.

    The last router is used because the losses of later routers also flow into the gradients of earlier ones. Either
    each router has its own loss, or routers whose names differ only in numbers have one loss of all their tokens.
    """
    alike: dict[tuple[str, int], list[_Router]] = {}
    for router in routers:
        alike.setdefault((re.sub(r"\d+", "*", router.weight), router.scores.shape[1]), []).append(router)
    for (_, experts), same in alike.items():
        for words, balance in _formulas(experts):
            changes = [_change(balance, [router]) for router in same]
            if fit := _fit(runs, same[-1], changes[-1][1][-1], sum(change for change, _ in changes)):
                yield words, same[-1].weight, fit
            if len(same) > 1:
                change, moved = _change(balance, same)
                if fit := _fit(runs, same[-1], moved[-1], change):
                    yield f"{words} of all routers together", same[-1].weight, fit


def _routers(runs: PairedRuns, step: int, wrong: Mapping[Key, Difference]) -> Iterator[_Router]:
    """Yield possible routers: modules with a right output, distributed tokens and a matrix with a wrong gradient."""
    for key, record in runs.bounds.reference.items():
        shape = np.shape(record.value)
        if key[0] != "output" or key[2] != step or key in wrong or len(shape) < 2 or not 1 < shape[-1] <= _MOST_EXPERTS:
            continue
        weight = f"{record.module}.weight"
        gradient = runs.bounds.last_gradient(weight, step)
        if gradient is None or gradient not in wrong or runs.bounds.reference[gradient].value.ndim != 2:
            continue
        if runs.bounds.reference[gradient].value.shape[0] != shape[-1]:
            continue
        tokens = np.broadcast_to(np.arange(np.prod(shape[:-1])).reshape(*shape[:-1], 1), shape)
        places = {rank: runs.placement(key, rank) for rank in runs.holders(key)}
        if len(places) < runs.parallel.world_size or any(place is None for place in places.values()):
            continue
        taken = {rank: place.take(tokens) for rank, place in places.items() if place is not None}
        if all(part.shape[-1] == shape[-1] and part.size < tokens.size for part in taken.values()):
            parts = {rank: part[..., 0].reshape(-1) for rank, part in taken.items()}
            yield _Router(key, weight, np.asarray(record.value, dtype=np.float64).reshape(-1, shape[-1]), parts)


def _formulas(experts: int) -> Iterator[tuple[str, _Balance]]:
    """Yield the known formulas of load-balancing losses, in words."""
    for count in range(1, min(_MOST_CHOSEN, experts - 1) + 1):
        yield f"the load-balancing loss (share of tokens in the top {count} times mean probability)", _of_choices(count)
    yield "the load-balancing loss (square of the mean probability)", _of_squares
    yield "the load-balancing loss (entropy of the mean probability)", _of_entropy


def _of_choices(count: int) -> _Balance:
    def balance(probabilities: Any, _mean: Any) -> tuple[float, Any]:
        chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
        share = np.bincount(chosen.reshape(-1), minlength=probabilities.shape[1]) / len(probabilities)
        mean = probabilities.mean(0)
        return float(share @ mean), share

    return balance


def _of_squares(_probabilities: Any, mean: Any) -> tuple[float, Any]:
    return float(mean @ mean), 2 * mean


def _of_entropy(_probabilities: Any, mean: Any) -> tuple[float, Any]:
    logarithm = np.log(np.maximum(mean, np.finfo(float).tiny))
    return float(mean @ logarithm), logarithm + 1


def _change(balance: _Balance, routers: list[_Router]) -> tuple[float, list[Any]]:
    """Return the ranks' mean loss minus the loss of all tokens, and its derivatives with respect to outputs.

    Args:
        balance: the formula.
        routers: the routers whose tokens enter one loss.
    """
    chances = [_softmax(router.scores) for router in routers]
    total, slopes = _loss_of(balance, chances)
    moved, change = [-slope for slope in slopes], -total
    ranks = routers[0].parts
    for rank in ranks:
        rows = [router.parts[rank] for router in routers]
        value, slopes = _loss_of(balance, [each[part] for each, part in zip(chances, rows, strict=True)])
        change += value / len(ranks)
        for each, part, slope in zip(moved, rows, slopes, strict=True):
            each[part] += slope / len(ranks)
    return change, moved


def _fit(runs: PairedRuns, router: _Router, moved: Any, change: float) -> _Fit | None:
    """Return the best fit over the recorded values that may be the router's input; None if there is no such value."""
    tried = [_coefficient(runs, router, moved.T @ inputs, change) for inputs in _inputs(runs, router)]
    return min((fit for fit in tried if fit), key=lambda fit: fit.residual, default=None)


def _softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _loss_of(balance: _Balance, chances: list[Any]) -> tuple[float, list[Any]]:
    """Return the loss of some tokens of several routers, and its derivatives with respect to the routers' outputs."""
    together = np.concatenate(chances)
    value, slope = balance(together, together.mean(0))
    return value, [each * (slope - (each @ slope)[:, None]) / len(together) for each in chances]


def _inputs(runs: PairedRuns, router: _Router) -> Iterator[Any]:
    """Yield the recorded outputs of the step that have the shape of the router's input."""
    gradient = runs.bounds.last_gradient(router.weight, router.key[2])
    width = runs.bounds.reference[gradient].value.shape[1] if gradient else 0
    for key, record in runs.bounds.reference.items():
        shape = np.shape(record.value)
        size = len(router.scores) * width
        if key[0] not in {"output", "value"} or key[2] != router.key[2] or not shape or shape[-1] != width:
            continue
        if np.size(record.value) == size and record.value.dtype.kind == "f":
            yield np.asarray(record.value, dtype=np.float64).reshape(-1, width)


def _coefficient(runs: PairedRuns, router: _Router, direction: Any, change: float) -> _Fit | None:
    """Return the coefficient with which a direction fits the difference of the gradients best, over all ranks."""
    key = runs.bounds.last_gradient(router.weight, router.key[2])
    if key is None:
        return None
    product, squares, size, count = 0.0, 0.0, 0.0, 0
    for rank in runs.holders(key):
        place = runs.placement(key, rank)
        actual = None if place is None else runs.actual(key, rank, place)
        if place is None or actual is None:
            return None
        own = place.take(direction)
        rest = np.asarray(actual, dtype=np.float64) - place.take(np.asarray(runs.bounds.reference[key].value))
        product, squares = product + float((own * rest).sum()), squares + float((own**2).sum())
        size, count = size + float((rest**2).sum()), count + own.size
    if count < _ENOUGH or not squares or not size or not np.isfinite([product, squares, size]).all():
        return None
    factor = product / squares
    return _Fit(factor, float(np.sqrt(max(0.0, 1 - product**2 / squares / size))), factor * change)


def _explains_loss(runs: PairedRuns, key: Key, fit: _Fit) -> bool:
    """Return whether the mean of the ranks' losses is the reference's plus ``fit.of_loss``."""
    values = [float(runs.value(key, rank)) for rank in runs.holders(key) if runs.value(key, rank).size == 1]
    off = float(np.mean(values)) - float(runs.bounds.reference[key].value) if values else 0.0
    return abs(off - fit.of_loss) <= 4 * float(np.max(runs.bounds.allowed(key))) + _RESIDUAL * abs(off)

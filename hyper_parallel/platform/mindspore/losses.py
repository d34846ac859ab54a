"""MindSpore's loss operators, which carry their reduction as a number."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform.mindspore.primitives import COMPOSED, composed, unless

__all__ = ["COMPOSED"]

REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def _named(reduction: Any) -> str:
    return str(REDUCTIONS.get(reduction, reduction))


@composed("NLLLoss")
def _nll_loss(ops: Any, _: Any, x: Any, target: Any, weight: Any, reduction: Any = 1, ignore_index: int = -100) -> Any:
    """With the total weight in second place, which no caller in MindSpore uses."""
    loss = ops.nll_loss(x, target, unless(weight, 1), ignore_index=ignore_index, reduction=_named(reduction))
    return loss, None


@composed("MSELossExt")
def _mse_loss(ops: Any, _: Any, x: Any, target: Any, reduction: Any = 1) -> Any:
    return ops.mse_loss(x, target, reduction=_named(reduction))


@composed("L1LossExt")
def _l1_loss(ops: Any, _: Any, x: Any, target: Any, reduction: Any = 1) -> Any:
    return ops.l1_loss(x, target, reduction=_named(reduction))


@composed("SmoothL1Loss")
def _smooth_l1_loss(ops: Any, _: Any, x: Any, target: Any, beta: float = 1.0, reduction: Any = 2) -> Any:
    return ops.smooth_l1_loss(x, target, beta=beta, reduction=_named(reduction))


@composed("BinaryCrossEntropy")
def _binary_cross_entropy(ops: Any, _: Any, x: Any, target: Any, weight: Any = None, reduction: Any = 1) -> Any:
    return ops.binary_cross_entropy(x, target, unless(weight, 1), reduction=_named(reduction))


@composed("BCEWithLogitsLoss")
def _with_logits(
    ops: Any, _: Any, x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: Any = 1
) -> Any:
    weights = {"weight": unless(weight, 1), "pos_weight": unless(pos_weight, 1)}
    return ops.binary_cross_entropy_with_logits(x, target, **weights, reduction=_named(reduction))


@composed("KLDiv")
def _kl_div(ops: Any, _: Any, x: Any, target: Any, reduction: Any = 1, log_target: bool = False) -> Any:
    return ops.kl_div(x, target, reduction=_named(reduction), log_target=log_target)

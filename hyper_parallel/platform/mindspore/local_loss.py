"""What losses are made of, on plain MindSpore tensors, composed of kernels that CPU has too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.platform.mindspore.empty import nothing, tolerant

__all__ = ["LOCAL", "REDUCING"]

_total = tolerant("sum", mint.sum)
FLOOR = -100.0  # what binary cross entropy clamps logarithms to


def _own_classes(target: Tensor, start: int, held: int, classes: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in this rank's classes, and where (0 for the others)."""
    known = mint.logical_and(target >= 0, target < classes).asnumpy()
    if not known.all():
        msg = f"Target {int(target.asnumpy()[~known].reshape(-1)[0])} is out of bounds."
        raise IndexError(msg)
    mine = mint.logical_and(target >= start, target < start + held)
    return mine, mint.where(mine, target - start, ops.zeros_like(target))


def _pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    shape = tuple(index.shape)
    return mint.gather(x, dim, index.reshape((*shape[:dim], 1, *shape[dim:]))).reshape(shape)


def _take_class(x: Tensor, target: Tensor, dim: int, start: int = 0, classes: int | None = None) -> Tensor:
    if 0 in target.shape or not x.shape[dim]:
        return _total(x, dim)
    if classes is None:
        return _pick(x, target, dim)
    mine, index = _own_classes(target, start, x.shape[dim], classes)
    picked = _pick(x, index, dim)
    return mint.where(mine, picked, ops.zeros_like(picked))


def _take_weight(x: Tensor, target: Tensor, dim: int = 0, start: int = 0, classes: int | None = None) -> Tensor:
    del dim
    if not x.shape[0]:
        return mint.broadcast_to(_total(x), tuple(target.shape))
    if 0 in target.shape:
        return nothing(tuple(target.shape), x)
    if classes is None:
        return ops.gather(x, target, 0)
    mine, index = _own_classes(target, start, x.shape[0], classes)
    picked = ops.gather(x, index, 0)
    return mint.where(mine, picked, ops.zeros_like(picked))


def _class_max(x: Tensor, dim: int) -> Tensor:
    shape = tuple(1 if one == dim else size for one, size in enumerate(x.shape))
    if 0 in x.shape:
        return ops.full(shape, -math.inf, dtype=x.dtype)
    return mint.amax(ops.stop_gradient(x), dim, True)


def _smooth_l1(x: Tensor, target: Tensor, beta: float = 1.0) -> Tensor:
    size = mint.abs(x - target)
    return size if beta == 0 else mint.where(size < beta, size * size / (2 * beta), size - beta / 2)


def _huber(x: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    size = mint.abs(x - target)
    return mint.where(size <= delta, size * size / 2, (size - delta / 2) * delta)


def _softplus(x: Tensor) -> Tensor:
    return F.relu(x) + mint.log1p(mint.exp(-mint.abs(x)))


def _cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    rows = -(target * mint.clamp(mint.log(x), FLOOR) + (1 - target) * mint.clamp(mint.log(1 - x), FLOOR))
    return rows if weight is None else rows * weight


def _logits(x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None) -> Tensor:
    steep = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    rows = (1 - target) * x + steep * _softplus(-x)
    return rows if weight is None else rows * weight


def _kl_div(x: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    if log_target:
        return mint.exp(target) * (target - x)
    return mint.xlogy(target, target) - target * x


LOCAL: dict[str, Callable[..., Any]] = {
    "take_class": _take_class,
    "take_weight": _take_weight,
    "class_max": _class_max,
    "mse_loss_elements": lambda x, target: (x - target) * (x - target),
    "l1_loss_elements": lambda x, target: mint.abs(x - target),
    "smooth_l1_loss_elements": _smooth_l1,
    "huber_loss_elements": _huber,
    "soft_margin_loss_elements": lambda x, target: _softplus(-target * x),
    "binary_cross_entropy_elements": _cross_entropy,
    "binary_cross_entropy_with_logits_elements": _logits,
    "kl_div_elements": _kl_div,
}
# These see to empty pieces themselves.
REDUCING = frozenset({"take_class", "take_weight", "class_max"})

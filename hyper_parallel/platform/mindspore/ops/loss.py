"""Losses of MindSpore, whose operators carry their reduction as a number."""

from __future__ import annotations

import math
from typing import Any

from mindspore import Tensor, bfloat16, float32, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.mindspore.ops.empty_shards import OnEmpty, empty_safe, no_elements
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel, replicated, unless_constant

__all__: list[str] = []

# -- kernels -----------------------------------------------------------------------------------------------------------

_sum = empty_safe("sum", mint.sum, OnEmpty(value=0))
FLOOR = -100.0  # binary cross entropy clamps logarithms at this value


def _local_classes(target: Tensor, start: int, count: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return which targets are among this rank's classes, and their local indices (0 for the others)."""
    known = mint.logical_and(target >= 0, target < classes).asnumpy()
    if not known.all():
        msg = f"Target {int(target.asnumpy()[~known].reshape(-1)[0])} is out of bounds."
        raise IndexError(msg)
    mine = mint.logical_and(target >= start, target < start + count)
    return mine, mint.where(mine, target - start, ops.zeros_like(target))


def _gathered(x: Tensor, index: Tensor, dim: int) -> Tensor:
    shape = tuple(index.shape)
    return mint.gather(x, dim, index.reshape((*shape[:dim], 1, *shape[dim:]))).reshape(shape)


@kernel("take_class", reliable_on_empty=True)
def _take_class(x: Tensor, target: Tensor, dim: int, start: int = 0, classes: int | None = None) -> Tensor:
    if 0 in target.shape or not x.shape[dim]:
        return _sum(x, dim)
    if classes is None:
        return _gathered(x, target, dim)
    mine, index = _local_classes(target, start, x.shape[dim], classes)
    taken = _gathered(x, index, dim)
    return mint.where(mine, taken, ops.zeros_like(taken))


@kernel("take_weight", reliable_on_empty=True)
def _take_weight(x: Tensor, target: Tensor, dim: int = 0, start: int = 0, classes: int | None = None) -> Tensor:
    del dim
    if not x.shape[0]:
        return mint.broadcast_to(_sum(x), tuple(target.shape))
    if 0 in target.shape:
        return no_elements(tuple(target.shape), x)
    if classes is None:
        return ops.gather(x, target, 0)
    mine, index = _local_classes(target, start, x.shape[0], classes)
    taken = ops.gather(x, index, 0)
    return mint.where(mine, taken, ops.zeros_like(taken))


@kernel("class_max", reliable_on_empty=True)
def _class_max(x: Tensor, dim: int) -> Tensor:
    shape = tuple(1 if axis == dim else size for axis, size in enumerate(x.shape))
    if 0 in x.shape:
        return ops.full(shape, -math.inf, dtype=x.dtype)
    return mint.amax(ops.stop_gradient(x), dim, True)


kernel("mse_loss_elements")(lambda x, target: (x - target) * (x - target))
kernel("l1_loss_elements")(lambda x, target: mint.abs(x - target))
kernel("soft_margin_loss_elements")(lambda x, target: _softplus(-target * x))


@kernel("smooth_l1_loss_elements")
def _smooth_l1(x: Tensor, target: Tensor, beta: float = 1.0) -> Tensor:
    size = mint.abs(x - target)
    return size if beta == 0 else mint.where(size < beta, size * size / (2 * beta), size - beta / 2)


@kernel("huber_loss_elements")
def _huber(x: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    size = mint.abs(x - target)
    return mint.where(size <= delta, size * size / 2, (size - delta / 2) * delta)


def _softplus(x: Tensor) -> Tensor:
    return F.relu(x) + mint.log1p(mint.exp(-mint.abs(x)))


@kernel("binary_cross_entropy_elements")
def _cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    rows = -(target * mint.clamp(mint.log(x), FLOOR) + (1 - target) * mint.clamp(mint.log(1 - x), FLOOR))
    return rows if weight is None else rows * weight


@kernel("binary_cross_entropy_with_logits_elements")
def _cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None
) -> Tensor:
    steep = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    rows = (1 - target) * x + steep * _softplus(-x)
    return rows if weight is None else rows * weight


@kernel("kl_div_elements")
def _kl_div(x: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    if log_target:
        return mint.exp(target) * (target - x)
    return mint.xlogy(target, target) - target * x


# -- decompositions ----------------------------------------------------------------------------------------------------

REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def _reduction_name(reduction: Any) -> str:
    return str(REDUCTIONS.get(reduction, reduction))


def _reduced(ops: Any, rows: Any, reduction: Any) -> Any:
    reduction = REDUCTIONS.get(reduction, reduction)
    return {"none": lambda: rows, "mean": lambda: ops.mean(rows), "sum": lambda: ops.sum(rows)}[reduction]()


@decomposition("NLLLoss")
def _nll_loss(ops: Any, _: Any, x: Any, target: Any, weight: Any, reduction: Any = 1, ignore_index: int = -100) -> Any:
    """Return the loss, and None for the total weight, which no caller in MindSpore uses."""
    weight = unless_constant(weight, 1)
    loss = ops.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=_reduction_name(reduction))
    return loss, None


@decomposition("MSELossExt")
def _mse_loss(ops: Any, _: Any, x: Any, target: Any, reduction: Any = 1) -> Any:
    return ops.mse_loss(x, target, reduction=_reduction_name(reduction))


@decomposition("L1LossExt")
def _l1_loss(ops: Any, _: Any, x: Any, target: Any, reduction: Any = 1) -> Any:
    return ops.l1_loss(x, target, reduction=_reduction_name(reduction))


@decomposition("SmoothL1Loss")
def _smooth_l1_loss(ops: Any, _: Any, x: Any, target: Any, beta: float = 1.0, reduction: Any = 2) -> Any:
    return ops.smooth_l1_loss(x, target, beta=beta, reduction=_reduction_name(reduction))


@decomposition("BinaryCrossEntropy")
def _binary_cross_entropy(ops: Any, _: Any, x: Any, target: Any, weight: Any = None, reduction: Any = 1) -> Any:
    return ops.binary_cross_entropy(x, target, unless_constant(weight, 1), reduction=_reduction_name(reduction))


@decomposition("BCEWithLogitsLoss")
def _with_logits(
    ops: Any, _: Any, x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: Any = 1
) -> Any:
    weights = {"weight": unless_constant(weight, 1), "pos_weight": unless_constant(pos_weight, 1)}
    dtype = target.dtype
    if x.dtype != dtype or dtype == bfloat16:  # float32 has kernels; the result is cast to the target's dtype
        x, target = (ops.cast(each, dtype=float32) for each in (x, target))
    loss = ops.binary_cross_entropy_with_logits(x, target, **weights, reduction=_reduction_name(reduction))
    return ops.cast(loss, dtype=dtype) if loss.dtype != dtype else loss


@decomposition("KLDiv")
def _kl_divergence(ops: Any, _: Any, x: Any, target: Any, reduction: Any = 1, log_target: bool = False) -> Any:
    return ops.kl_div(x, target, reduction=_reduction_name(reduction), log_target=log_target)


@decomposition("SoftMarginLoss")
def _soft_margin(ops: Any, primitive: Any, x: Any, target: Any, reduction: Any = None) -> Any:
    name = primitive.init_attrs["reduction"] if reduction is None else reduction
    return ops.soft_margin_loss(x, target, reduction=REDUCTIONS.get(name, name))


@decomposition("KLDivLoss")
def _legacy_kl_divergence(ops: Any, primitive: Any, x: Any, target: Any) -> Any:
    """Return the KL divergence; as in MindSpore, no gradient flows to the target.

    Where the target is not positive, the kernel adds no loss, but has the usual derivative.
    """
    name, target = primitive.init_attrs["reduction"], ops.detach(target)
    rows = ops.where(ops.gt(target, 0), ops.kl_div(x, target, reduction="none"), 0)
    slope = ops.where(ops.lt(target, 0), ops.mul(target, x), 0)
    rows = ops.sub(rows, ops.sub(slope, ops.detach(slope)))
    if name == "none":
        return rows
    loss = ops.mean(rows) if name == "mean" else ops.sum(rows)
    return ops.div(loss, x.shape[0]) if name == "batchmean" else loss


@decomposition("SigmoidCrossEntropyWithLogits")
def _legacy_with_logits(ops: Any, _: Any, x: Any, target: Any) -> Any:
    """Return the binary cross entropy of logits; as in MindSpore, no gradient flows to the target."""
    return ops.binary_cross_entropy_with_logits(x, ops.detach(target), reduction="none")


@decomposition("SoftmaxCrossEntropyWithLogits")
def _softmax_cross_entropy(ops: Any, _: Any, x: Any, target: Any) -> Any:
    """Return the loss and, as the primitive does, its derivative with respect to ``x``, which backward uses, too.

    The derivative is as MindSpore defines it: for targets that do not add up to 1 it differs from that of the loss. In
    a second derivative, the target and the second output are constants.
    """
    rows, fixed = ops.log_softmax(ops.detach(x), -1), ops.detach(target)
    slope = ops.sub(ops.exp(rows), fixed)
    loss = ops.neg(ops.sum(ops.mul(rows, fixed), -1))
    zero = ops.sub(x, ops.detach(x))
    return ops.add(loss, ops.sum(ops.mul(zero, slope), -1)), slope


@decomposition("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_softmax_cross_entropy(ops: Any, primitive: Any, x: Any, target: Any) -> Any:
    """Return the mean loss of rows, or with ``is_grad`` its derivative with respect to ``x``."""
    if not primitive.init_attrs.get("is_grad", False):
        return ops.cross_entropy(x, target)
    classes = ops.cast(ops.one_hot(target, x.shape[-1]), dtype=x.dtype)
    return ops.div(ops.sub(ops.softmax(x, -1), classes), x.shape[0])


@decomposition("ClipByNorm")
def _clip_by_norm(ops: Any, primitive: Any, x: Any, clip_norm: Any) -> Any:
    """Scale ``x`` so that its norm is at most ``clip_norm``; the result is float32.

    Raises:
        UnsupportedOperatorError: norms along some dims, for which MindSpore's kernel is wrong after the first row.
    """
    expect("ClipByNorm", "axis", primitive.init_attrs["axis"], ())
    wide = ops.cast(x, dtype=float32)
    norm = ops.sqrt(ops.sum(ops.square(wide)))
    bound = clip_norm if isinstance(clip_norm, DTensor) else replicated(clip_norm, x)
    return ops.div(ops.mul(wide, bound), ops.maximum(norm, bound))


@decomposition("CosineEmbeddingLoss")
def _cosine_embedding(ops: Any, _: Any, x: Any, y: Any, target: Any, margin: float = 0.0, reduction: Any = 1) -> Any:
    """``1 - cos`` where the target is 1, the excess over the margin where it is -1."""
    tiny = 1e-12  # the kernel adds this to both squared lengths
    lengths = [ops.add(ops.sum(ops.square(operand), -1), tiny) for operand in (x, y)]
    cosine = ops.div(ops.sum(ops.mul(x, y), -1), ops.sqrt(ops.mul(*lengths)))
    alike = ops.where(ops.eq(target, 1), ops.rsub(cosine, 1), 0)
    apart = ops.where(ops.eq(target, -1), ops.relu(ops.sub(cosine, margin)), 0)
    return _reduced(ops, ops.add(alike, apart), reduction)

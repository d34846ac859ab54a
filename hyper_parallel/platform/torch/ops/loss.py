"""PyTorch's losses; they are intercepted at function level only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.shard.rules.loss import reduce_partials
from hyper_parallel.platform.torch.ops.python_api import unwrapped
from hyper_parallel.platform.torch.ops.registry import decomposition, kernel, signature_of, spelling
from hyper_parallel.platform.torch.versions import assert_async

# -- losses of elements ------------------------------------------------------------------------------------------------

_REDUCTION = "size_average=None, reduce=None, reduction='mean'"

spelling("soft_margin_loss", F.soft_margin_loss, signature=f"x, target, {_REDUCTION}")
spelling("binary_cross_entropy", F.binary_cross_entropy, signature=f"x, target, weight=None, {_REDUCTION}")
spelling(
    "binary_cross_entropy_with_logits",
    F.binary_cross_entropy_with_logits,
    signature=f"x, target, weight=None, {_REDUCTION}, pos_weight=None",
)
spelling("kl_div", F.kl_div, signature=f"x, target, {_REDUCTION}, log_target=False")
spelling("smooth_l1_loss", F.smooth_l1_loss, signature=f"x, target, {_REDUCTION}, beta=1.0")
spelling("multi_margin_loss", F.multi_margin_loss, signature=f"x, target, p=1, margin=1.0, weight=None, {_REDUCTION}")
spelling("multilabel_margin_loss", F.multilabel_margin_loss, signature=f"x, target, {_REDUCTION}")


def _weighted(op: str, signature: str) -> None:
    """Register ``F.<op>`` with an optional elementwise weight."""

    @decomposition(getattr(F, op), signature=signature)
    def run(ops: Any, x: Any, target: Any, weight: Any, **rest: Any) -> Any:
        if weight is None:
            return getattr(ops, op)(x, target, **rest)
        options = {key: value for key, value in rest.items() if key == "delta"}
        elements = getattr(ops, f"{op}_elements")(x, target, **options)
        return ops.weighted_loss(elements, weight, rest["reduction"])


_weighted("mse_loss", f"x, target, {_REDUCTION}, weight=None")
_weighted("l1_loss", f"x, target, {_REDUCTION}, weight=None")
_weighted("huber_loss", "x, target, reduction='mean', delta=1.0, weight=None")


@decomposition(F.gaussian_nll_loss, signature="x, target, var, full=False, eps=1e-06, reduction='mean'")
def _gaussian_nll_loss(_ops: Any, x: Any, target: Any, var: Any, **rest: Any) -> Any:
    """Run PyTorch's implementation with ``var`` reduced first, since it is clamped in place."""
    run = unwrapped(F.gaussian_nll_loss)
    return run(x, target, reduce_partials(var, "gaussian_nll_loss", "var"), **rest)  # type: ignore[misc] # it is in Python


@kernel("mse_loss_elements")
def _mse_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(x, target, reduction="none")


@kernel("l1_loss_elements")
def _l1_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(x, target, reduction="none")


@kernel("smooth_l1_loss_elements")
def _smooth_l1_loss(x: Tensor, target: Tensor, beta: float) -> Tensor:
    return F.smooth_l1_loss(x, target, beta=beta, reduction="none")


@kernel("huber_loss_elements")
def _huber_loss(x: Tensor, target: Tensor, delta: float) -> Tensor:
    return F.huber_loss(x, target, delta=delta, reduction="none")


@kernel("soft_margin_loss_elements")
def _soft_margin_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.soft_margin_loss(x, target, reduction="none")


@kernel("binary_cross_entropy_elements")
def _binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    return F.binary_cross_entropy(x, target, weight, reduction="none")


@kernel("binary_cross_entropy_with_logits_elements")
def _binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None
) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=pos_weight, reduction="none")


@kernel("kl_div_elements")
def _kl_div(x: Tensor, target: Tensor, log_target: bool) -> Tensor:
    return F.kl_div(x, target, log_target=log_target, reduction="none")


@kernel("multi_margin_loss_elements")
def _multi_margin_loss(
    x: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    return F.multi_margin_loss(x, target, p, margin, weight, reduction="none")


@kernel("multilabel_margin_loss_elements")
def _multilabel_margin_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.multilabel_margin_loss(x, target, reduction="none")


# -- losses over classes -----------------------------------------------------------------------------------------------


def _in_float32(op: str) -> None:
    """Register ``F.<op>`` so that it runs entirely in float32 under autocast, as in PyTorch."""

    @decomposition(getattr(F, op), signature=signature_of(op))
    def run(ops: Any, x: Any, **rest: Any) -> Any:
        if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
            return getattr(ops, op)(x, **rest)
        arguments = {key: _float32(value) for key, value in {"x": x, **rest}.items()}
        with torch.autocast(x.device.type, enabled=False):
            return getattr(ops, op)(**arguments)


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in {torch.bfloat16, torch.float16} else value


_in_float32("cross_entropy")
_in_float32("nll_loss")


@kernel("take_class")
def _take_class(x: Tensor, target: Tensor, dim: int, start: int = 0, classes: int | None = None) -> Tensor:
    """Select the class; ``pow(1)`` gives the gradient a graph, as in PyTorch's losses, without changing values."""
    if classes is None:
        return x.gather(dim, target.unsqueeze(dim)).squeeze(dim).pow(1)
    local, index = _local_classes(target, start, x.shape[dim], classes)
    if not x.shape[dim]:
        return x.sum(dim).pow(1)
    return torch.where(local, x.gather(dim, index.unsqueeze(dim)).squeeze(dim).pow(1), 0.0)


@kernel("take_weight")
def _take_weight(x: Tensor, target: Tensor, dim: int = 0, start: int = 0, classes: int | None = None) -> Tensor:
    del dim
    if classes is None:
        return x[target]
    local, index = _local_classes(target, start, x.shape[0], classes)
    if not x.shape[0]:
        return x.sum().expand(target.shape)
    return torch.where(local, x[index], 0.0)


def _local_classes(target: Tensor, start: int, count: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return which targets are among this rank's classes, and their local index (0 for the others)."""
    known = (target >= 0) & (target < classes)
    if target.device.type == "cpu":
        if not bool(known.all()):
            msg = f"Target {int(target[~known].reshape(-1)[0])} is out of bounds."
            raise IndexError(msg)
    else:
        assert_async(known.all())
    local = (target >= start) & (target < start + count)
    return local, torch.where(local, target - start, 0)


@kernel("class_max")
def _class_max(x: Tensor, dim: int) -> Tensor:
    plain = x.detach()
    if plain.shape[dim]:
        return plain.amax(dim, keepdim=True)
    return plain.new_full([1 if index == dim else size for index, size in enumerate(plain.shape)], -torch.inf)


# -- connectionist temporal classification -----------------------------------------------------------------------------

_CTC = "log_probs, targets, input_lengths, target_lengths, blank=0"


@decomposition(F.ctc_loss, signature=f"{_CTC}, reduction='mean', zero_infinity=False")
def _ctc_loss(ops: Any, **arguments: Any) -> Any:
    return ops.ctc_loss(**arguments)


@decomposition(torch.ctc_loss, signature=f"{_CTC}, reduction=0, zero_infinity=False")
def _ctc_loss_by_number(ops: Any, reduction: int, **arguments: Any) -> Any:
    return ops.ctc_loss(reduction=("none", "mean", "sum")[reduction], **arguments)


@kernel("ctc_loss_elements")
def _ctc_loss_elements(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    zero_infinity: bool = False,
    per_target: bool = False,
) -> Tensor:  # fmt: skip
    losses = torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
    if not per_target:
        return losses
    lengths = torch.as_tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return losses / lengths.clamp(min=1).reshape(losses.shape)

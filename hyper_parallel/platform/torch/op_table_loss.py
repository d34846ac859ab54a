"""PyTorch's spellings of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.core.shard.rules import loss
from hyper_parallel.platform.torch.op_table_pointwise import routed
from hyper_parallel.platform.torch.opened import opened

__all__ = ["LOCAL", "add_functions", "add_overloads"]


Spell = Callable[..., None]


def _own_classes(target: Tensor, start: int, held: int, classes: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in this rank's classes, and where (0 for the others)."""
    known = (target >= 0) & (target < classes)
    if target.device.type == "cpu":
        if not bool(known.all()):
            msg = f"Target {int(target[~known].reshape(-1)[0])} is out of bounds."
            raise IndexError(msg)
    else:
        torch._assert_async(known.all())  # noqa: SLF001 - the framework's check without a wait
    mine = (target >= start) & (target < start + held)
    return mine, torch.where(mine, target - start, 0)


def _take_class(x: Tensor, target: Tensor, dim: int, start: int = 0, classes: int | None = None) -> Tensor:
    if classes is None:
        return x.gather(dim, target.unsqueeze(dim)).squeeze(dim)
    mine, index = _own_classes(target, start, x.shape[dim], classes)
    if not x.shape[dim]:
        return x.sum(dim)
    return torch.where(mine, x.gather(dim, index.unsqueeze(dim)).squeeze(dim), 0.0)


def _take_weight(x: Tensor, target: Tensor, dim: int = 0, start: int = 0, classes: int | None = None) -> Tensor:
    del dim
    if classes is None:
        return x[target]
    mine, index = _own_classes(target, start, x.shape[0], classes)
    if not x.shape[0]:
        return x.sum().expand(target.shape)
    return torch.where(mine, x[index], 0.0)


def _class_max(x: Tensor, dim: int) -> Tensor:
    plain = x.detach()
    if plain.shape[dim]:
        return plain.amax(dim, keepdim=True)
    return plain.new_full([1 if one == dim else size for one, size in enumerate(plain.shape)], -torch.inf)


def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    zero_infinity: bool = False,
    per_target: bool = False,
) -> Tensor:  # fmt: skip
    rows = torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
    if not per_target:
        return rows
    lengths = torch.as_tensor(target_lengths, dtype=rows.dtype, device=rows.device)
    return rows / lengths.clamp(min=1).reshape(rows.shape)


LOCAL: dict[str, Callable[..., Any]] = {
    "ctc_loss_elements": _ctc,
    "multi_margin_loss_elements": lambda x, target, p=1, margin=1.0, weight=None: F.multi_margin_loss(
        x, target, p, margin, weight, reduction="none"
    ),
    "multilabel_margin_loss_elements": lambda x, target: F.multilabel_margin_loss(x, target, reduction="none"),
    "take_class": _take_class,
    "take_weight": _take_weight,
    "class_max": _class_max,
    "mse_loss_elements": lambda x, target: F.mse_loss(x, target, reduction="none"),
    "l1_loss_elements": lambda x, target: F.l1_loss(x, target, reduction="none"),
    "smooth_l1_loss_elements": lambda x, target, beta: F.smooth_l1_loss(x, target, beta=beta, reduction="none"),
    "huber_loss_elements": lambda x, target, delta: F.huber_loss(x, target, delta=delta, reduction="none"),
    "soft_margin_loss_elements": lambda x, target: F.soft_margin_loss(x, target, reduction="none"),
    "binary_cross_entropy_elements": lambda x, target, weight: F.binary_cross_entropy(
        x, target, weight, reduction="none"
    ),
    "binary_cross_entropy_with_logits_elements": lambda x, target, weight, pos_weight: (
        F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=pos_weight, reduction="none")
    ),
    "kl_div_elements": lambda x, target, log_target: F.kl_div(x, target, log_target=log_target, reduction="none"),
}

OLD = "size_average=None, reduce=None, reduction='mean'"
SIGNATURES = {
    "soft_margin_loss": f"x, target, {OLD}",
    "binary_cross_entropy": f"x, target, weight=None, {OLD}",
    "binary_cross_entropy_with_logits": f"x, target, weight=None, {OLD}, pos_weight=None",
    "kl_div": f"x, target, {OLD}, log_target=False",
    "smooth_l1_loss": f"x, target, {OLD}, beta=1.0",
    "multi_margin_loss": f"x, target, p=1, margin=1.0, weight=None, {OLD}",
    "multilabel_margin_loss": f"x, target, {OLD}",
}
WEIGHTED = {
    "mse_loss": f"x, target, {OLD}, weight=None",
    "l1_loss": f"x, target, {OLD}, weight=None",
    "huber_loss": "x, target, reduction='mean', delta=1.0, weight=None",
}


def _weighted(name: str) -> Callable[..., Any]:
    def run(ops: Any, x: Any, target: Any, weight: Any, **rest: Any) -> Any:
        if weight is None:
            return getattr(ops, name)(x, target, **rest)
        options = {key: value for key, value in rest.items() if key == "delta"}
        rows = getattr(ops, f"{name}_elements")(x, target, **options)
        return ops.weighted_loss(rows, weight, rest["reduction"])

    return run


def _wide(name: str) -> Callable[..., Any]:
    """The loss ``name``; under autocast in float32, all of it, as PyTorch's own is."""

    def run(ops: Any, x: Any, **rest: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            return getattr(ops, name)(x, **rest)
        given = {key: _float32(value) for key, value in {"x": x, **rest}.items()}
        with torch.autocast(x.device.type, enabled=False):
            return getattr(ops, name)(**given)

    return run


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in {torch.bfloat16, torch.float16} else value


def _gaussian(ops: Any, x: Any, target: Any, var: Any, **rest: Any) -> Any:
    """As PyTorch wrote it; only that a sum pending in ``var`` cannot be clamped in place."""
    del ops
    run = opened(F.gaussian_nll_loss)
    return run(x, target, loss.settled(var, "gaussian_nll_loss", "var"), **rest)  # type: ignore[misc] # it is in Python


def add_functions(table: dict[Any, OpEntry], spell: Spell) -> None:
    """Add every spelling of the Python API."""
    for name in ("cross_entropy", "nll_loss"):
        routed(table, getattr(F, name), find_rule(name).signature, _wide(name))  # type: ignore[union-attr] # see above
    for name, signature in SIGNATURES.items():
        spell(name, getattr(F, name), signature)
    for name, signature in WEIGHTED.items():
        routed(table, getattr(F, name), signature, _weighted(name))
    routed(table, F.gaussian_nll_loss, "x, target, var, full=False, eps=1e-06, reduction='mean'", _gaussian)
    names = "log_probs, targets, input_lengths, target_lengths, blank=0, reduction='mean', zero_infinity=False"
    routed(table, F.ctc_loss, names, lambda ops, **given: ops.ctc_loss(**given))
    names = "log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False"
    routed(
        table, torch.ctc_loss, names,
        lambda ops, reduction, **given: ops.ctc_loss(reduction=("none", "mean", "sum")[reduction], **given),
    )  # fmt: skip


def add_overloads(spell: Spell) -> None:
    """Losses arrive at function level only."""
    del spell

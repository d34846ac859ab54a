"""Records the targets of losses and the masks of attention scores in a PyTorch program.

Targets and masks are not results of modules, but a wrong one explains why a loss or an output is wrong. Each is
recorded with the logits or scores to which it is applied: these identify the part of the reference with which a rank's
targets or mask are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["FUNCTIONS", "applied"]

FUNCTIONS = (
    *((nn.functional, name) for name in ("cross_entropy", "nll_loss", "scaled_dot_product_attention")),
    *((torch.Tensor, name) for name in ("masked_fill", "masked_fill_")),
    (torch, "masked_fill"),
)
"""Owners and names of the functions."""

_SIZE = 1 << 20
"""Maximum number of elements in the recorded logits or scores of one call."""

_HIDDEN = -1e4
"""A score that is replaced by this number or a smaller one counts as masked: its exponential is zero in every dtype."""

_COLUMNS = 16
"""Maximum number of classes whose logits are recorded to identify a row."""


def applied(name: str, record: Callable[[str, Any, Any], None], args: Any, kwargs: Any) -> None:
    """Record the targets or the mask of a call; calls without them, or on tensors of a subclass, are skipped.

    Args:
        name: a name in ``FUNCTIONS``.
        record: called with the name, the logits or scores, and the targets or the mask.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
    """
    parameters, read = _READERS[name]
    numbers = read(dict(zip(parameters, args, strict=False)) | kwargs)
    if numbers is not None and 1 < numbers[0].numel() <= _SIZE:
        record(name.rstrip("_"), *(each.detach() for each in numbers))


def _labelled(given: Any) -> tuple[Any, Any] | None:
    logits, target = given.get("input"), given.get("target")
    if not _are_plain(logits, target) or target.is_floating_point() or logits.dim() != target.dim() + 1:
        return None
    if logits.dim() < 2:
        return None
    return logits.movedim(1, -1)[..., :_COLUMNS].flatten(0, -2), target.flatten()


def _masked(given: Any) -> tuple[Any, Any] | None:
    scores, mask, value = given.get("input", given.get("self")), given.get("mask"), given.get("value")
    if not _are_plain(scores, mask) or scores.dim() < 2:
        return None
    value = value.item() if _are_plain(value) and value.dim() == 0 else value
    if not isinstance(value, (int, float)) or value > _HIDDEN:
        return None
    return _one_head(scores, mask.expand(scores.shape))


def _attention(given: Any) -> tuple[Any, Any] | None:
    query, key, mask = given.get("query"), given.get("key"), given.get("attn_mask")
    if not _are_plain(query, key) or not (mask is None or (_are_plain(mask) and mask.dtype == torch.bool)):
        return None
    shape = (*query.shape[:-1], key.shape[-2])
    if mask is None:
        if not given.get("is_causal") or len(shape) < 2:
            return None
        mask = ~torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
    else:
        mask = ~mask
    if query.dim() >= 4:
        query, key, mask = query[..., :1, :, :], key[..., :1, :, :], mask.expand(shape)[..., :1, :, :]
    shape = (*query.shape[:-1], key.shape[-2])
    if torch.Size(shape).numel() > _SIZE:
        return None
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return _one_head(query.float() @ key.float().transpose(-2, -1), mask.expand(shape))


def _one_head(scores: Any, hidden: Any) -> tuple[Any, Any]:
    """Return scores and mask of the first head if there are heads, because heads rarely have different masks."""
    return (scores[..., 0, :, :], hidden[..., 0, :, :]) if scores.dim() >= 4 else (scores, hidden)


def _are_plain(*tensors: Any) -> bool:
    return all(
        type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta
        for value in tensors
    )


_LOSS = (("input", "target"), _labelled)
_FILL = (("input", "mask", "value"), _masked)
_READERS: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[Any, Any] | None]]] = {
    "cross_entropy": _LOSS,
    "nll_loss": _LOSS,
    "masked_fill": _FILL,
    "masked_fill_": _FILL,
    "scaled_dot_product_attention": (("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), _attention),
}
"""For each function, the names of its first parameters, and a function that returns logits and targets, or scores and
mask, from a call's arguments by name."""

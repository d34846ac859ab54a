"""PyTorch's spellings of random operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from hyper_parallel.core.shard.dispatch import Entry
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.op_table_pointwise import routed

__all__ = ["LOCAL", "add_functions", "add_overloads"]

Spell = Callable[..., None]
aten = torch.ops.aten


def _write(x: Tensor, drawn: Tensor, dtype: Any) -> Tensor:
    del dtype
    return x.copy_(drawn)


def _make_like(x: Tensor, drawn: Tensor, dtype: Any) -> Tensor:
    return drawn.to(x.dtype if dtype is None else dtype)


def _drawn_by_rule(*_: Any, **__: Any) -> Any:
    """Stands for operators whose numbers are drawn by the plan."""
    msg = "random operators are drawn by their rule"
    raise AssertionError(msg)


def _pick(x: Tensor, drawn: Tensor, num_samples: int, replacement: bool) -> Tensor:
    """Places by their weights: the first to arrive, or where each number falls among the weights' running sum."""
    weights = x.double()
    positive = weights > 0
    if bool((weights < 0).any()) or not bool(weights.isfinite().all()) or not bool(positive.any(-1).all()):
        msg = "multinomial: weights must be finite, not negative, and not all zero"
        raise RuntimeError(msg)
    if replacement:
        running = weights.cumsum(-1)
        found = torch.searchsorted(running, drawn * running[..., -1:], right=True)
        places = torch.arange(x.shape[-1], device=x.device).expand_as(x)
        return found.minimum(torch.where(positive, places, 0).amax(-1, keepdim=True))
    if bool((positive.sum(-1) < num_samples).any()):
        msg = f"multinomial: fewer than {num_samples} weights are positive, and none may be drawn twice"
        raise RuntimeError(msg)
    return torch.where(positive, weights / -torch.log1p(-drawn), -1.0).topk(num_samples, -1).indices


LOCAL: dict[str, Callable[..., Any]] = {
    "cast_as": lambda x, other: x.to(other.dtype),
    "write": _write,
    "make_like": _make_like,
    "dropout": lambda x, p, training: F.dropout(x, p, training),
    "randint_like": lambda x, low, high, dtype, **_: torch.randint_like(x, low, high, dtype=dtype),
    "pick": _pick,
    "rand_like": lambda x, **_: torch.rand_like(x),
    "randn_like": lambda x, **_: torch.randn_like(x),
    "bernoulli": lambda x, generator: torch.bernoulli(x, generator=generator),
}
FILLS = ("exponential", "cauchy", "geometric", "log_normal")
LOCAL.update(dict.fromkeys(("uniform", "normal", "bernoulli_fill", "random_fill", *FILLS), _drawn_by_rule))
LOCAL.update(dict.fromkeys(("multinomial", "normal_around"), _drawn_by_rule))


def _dropout(ops: Any, x: Any, p: float, training: bool, inplace: bool) -> Any:
    dropped = ops.dropout(x, p, training)
    return x.copy_(dropped) if inplace and dropped is not x and training else dropped


def _channel_dropout(ops: Any, x: Any, p: float, training: bool, inplace: bool) -> Any:
    """Whole channels: one draw per sample and channel."""
    if x.ndim < 3:  # noqa: PLR2004 - batch, channel, and what is dropped with it
        msg = f"feature dropout needs batch, channel and a further dim, got {list(x.shape)}; use F.dropout"
        raise UnsupportedOperatorError(msg)
    if not training or p == 0.0:
        return x
    head = (slice(None), slice(None), *(slice(0, 1) for _ in range(x.ndim - 2)))
    mask = ops.dropout(torch.ones_like(x[head]), p, True)
    return x.mul_(mask) if inplace else x * mask


def add_functions(table: dict[Any, Entry], spell: Spell) -> None:
    """Add every spelling of the Python API."""
    routed(table, F.dropout, "x, p=0.5, training=True, inplace=False", _dropout)
    routed(table, torch.dropout, "x, p, train", lambda ops, x, p, train: ops.dropout(x, p, train))
    routed(
        table, torch.dropout_, "x, p, train", lambda ops, x, p, train: x.copy_(ops.dropout(x, p, train)) if train else x
    )
    for func in (F.dropout1d, F.dropout2d, F.dropout3d):
        routed(table, func, "x, p=0.5, training=True, inplace=False", _channel_dropout)
    spell("uniform", Tensor.uniform_, in_place=True)
    spell("normal", Tensor.normal_, in_place=True)
    spell("bernoulli_fill", Tensor.bernoulli_, in_place=True)
    for name in ("rand_like", "randn_like"):
        spell(name, getattr(torch, name))
    routed(
        table, torch.randint_like,
        "x, low, high=None, *, dtype=None, layout=None, device=None, pin_memory=None, requires_grad=False, "
        "memory_format=None",
        lambda ops, x, low, high, dtype, **_: ops.randint_like(
            x, *((0, low) if high is None else (low, high)), dtype=dtype
        ),
    )  # fmt: skip
    for name in FILLS:
        spell(name, getattr(Tensor, f"{name}_"), in_place=True)
    spell("multinomial", torch.multinomial)
    spell("multinomial", Tensor.multinomial)
    spell("normal_around", torch.normal)
    spell("bernoulli", torch.bernoulli)
    spell("bernoulli", Tensor.bernoulli)
    for init, (signature, run) in _INIT.items():
        routed(table, init, signature, run)


_INIT: dict[Any, tuple[str, Callable[..., Any]]] = {
    torch.nn.init.normal_: (
        "tensor, mean=0.0, std=1.0, generator=None",
        lambda ops, tensor, mean, std, generator: _no_grad(tensor.normal_, mean, std),  # noqa: ARG005
    ),
    torch.nn.init.uniform_: (
        "tensor, a=0.0, b=1.0, generator=None",
        lambda ops, tensor, a, b, generator: _no_grad(tensor.uniform_, a, b),  # noqa: ARG005
    ),
}


def _no_grad(write: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return write(*args)


def add_overloads(spell: Spell) -> None:
    """Add what arrives from C++."""
    spell("uniform", aten.uniform_.default, in_place=True)
    spell("normal", aten.normal_.default, in_place=True)
    spell("bernoulli_fill", aten.bernoulli_.float, in_place=True)
    for name in FILLS:
        spell(name, getattr(aten, f"{name}_").default, in_place=True)
    spell("multinomial", aten.multinomial.default)
    for one in ("Tensor_Tensor", "Tensor_float", "float_Tensor"):
        spell("normal_around", getattr(aten.normal, one))
    spell("rand_like", aten.rand_like.default)
    spell("randn_like", aten.randn_like.default)
    spell("bernoulli", aten.bernoulli.default)

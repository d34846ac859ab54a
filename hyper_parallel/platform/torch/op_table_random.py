"""PyTorch's spellings of random operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.dtensor.sampling import LocalSample
from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.platform.torch.op_table_pointwise import routed

__all__ = ["LOCAL", "add_functions", "add_overloads"]

Spell = Callable[..., None]
aten = torch.ops.aten


def _write(x: Tensor, drawn: LocalSample, dtype: Any) -> Tensor:
    """Into the memory of ``x``, block after block, unless autograd has to record it."""
    del dtype
    if x.is_contiguous() and not (x.requires_grad and torch.is_grad_enabled()):
        _fill(x.detach(), drawn)
        return x
    return x.copy_(_fill(torch.empty(drawn.shape, dtype=x.dtype, device=x.device), drawn))


def _make_like(x: Tensor, drawn: LocalSample, dtype: Any) -> Tensor:
    return _fill(torch.empty(drawn.shape, dtype=x.dtype if dtype is None else dtype, device=x.device), drawn)


def _fill(x: Tensor, drawn: LocalSample) -> Tensor:
    """Numbers of ``drawn`` in the places of a contiguous tensor."""
    places = x.view(drawn.rows)
    for rows, columns, values in () if x.is_meta else drawn.blocks():
        places[rows, columns].copy_(torch.from_numpy(values))
    return x


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


def _noise(x: Any, p: float, *, channels: bool) -> Any:
    """Ones, and zeros with probability ``p``: one per element, or per sample and channel."""
    if not 0.0 <= p <= 1.0:
        msg = f"dropout probability has to be between 0 and 1, but got {p}"
        raise ValueError(msg)
    if not channels:
        return torch.empty_like(x).bernoulli_(1.0 - p)
    if x.ndim < 2:
        msg = "Feature dropout requires at least 2 dimensions in the input"
        raise RuntimeError(msg)
    return x.new_empty((*x.shape[:2], *(1 for _ in range(x.ndim - 2)))).bernoulli_(1.0 - p)


def _feature_dropout(x: Any, p: float) -> Any:
    """Whole channels: one draw per sample and channel."""
    return _noise(x, p, channels=True) * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), None


SATURATION = 1.7580993408473766  # of SELU: what alpha dropout puts in place of an element


def _alpha_dropout(x: Any, p: float, *, channels: bool = False) -> Any:
    """Dropped elements saturate; scale and shift keep mean and variance."""
    if p == 1.0:
        return torch.zeros_like(x), None
    noise = _noise(x, p, channels=channels)
    scale = ((SATURATION * SATURATION * p + 1.0) * (1.0 - p)) ** -0.5
    return noise * scale, (noise - 1.0) * (SATURATION * scale) + SATURATION * scale * p


def _feature_alpha_dropout(x: Any, p: float) -> Any:
    return _alpha_dropout(x, p, channels=True)


def _dropping(draw: Callable[..., Any], *, in_place: bool) -> Callable[..., Any]:
    """``x`` times one factor and plus one term that ``draw`` makes."""

    def run(ops: Any, x: Any, p: float, train: bool) -> Any:
        del ops
        if not train or p == 0.0:
            return x
        factor, term = draw(x.detach(), p)
        if in_place:
            x.mul_(factor)
            return x if term is None else x.add_(term)
        return x * factor if term is None else x * factor + term

    return run


def _rrelu(*, in_place: bool) -> Callable[..., Any]:
    def run(ops: Any, x: Any, lower: float, upper: float, training: bool, generator: Any) -> Any:
        """A slope per element below zero: drawn, or the middle of the range."""
        del ops, generator
        if not training:
            return (torch._C._nn.leaky_relu_ if in_place else torch._C._nn.leaky_relu)(x, (lower + upper) / 2.0)  # noqa: SLF001
        slope = torch.empty_like(x).uniform_(lower, upper)
        if in_place:
            return x.mul_(torch.where(x.detach() > 0, torch.ones_like(slope), slope))
        return torch.where(x > 0, x, x * slope)

    return run


def _gumbel_softmax(ops: Any, logits: Any, tau: float, hard: bool, eps: float, dim: int) -> Any:
    """Softmax of logits with noise; hard ones are one-hot and have the soft ones' gradient."""
    del ops, eps  # PyTorch has no use for it either
    # The smallest number keeps the logarithm finite.
    drawn = torch.empty_like(logits).uniform_(torch.finfo(logits.dtype).tiny, 1.0)
    noise = -(-torch.log1p(-drawn)).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(soft).scatter(dim, index, 1.0) - soft.detach() + soft


DROPOUTS: dict[str, Callable[..., Any]] = {
    "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": _feature_alpha_dropout,
}


def add_functions(table: dict[Any, OpEntry], spell: Spell) -> None:
    """Add every spelling of the Python API."""
    routed(table, F.dropout, "x, p=0.5, training=True, inplace=False", _dropout)
    routed(table, torch.dropout, "x, p, train", lambda ops, x, p, train: ops.dropout(x, p, train))
    routed(
        table, torch.dropout_, "x, p, train", lambda ops, x, p, train: x.copy_(ops.dropout(x, p, train)) if train else x
    )
    for name, draw in DROPOUTS.items():
        routed(table, getattr(torch, name), "x, p, train", _dropping(draw, in_place=False))
        routed(table, getattr(torch, f"{name}_"), "x, p, train", _dropping(draw, in_place=True))
    routed(table, F.gumbel_softmax, "logits, tau=1, hard=False, eps=1e-10, dim=-1", _gumbel_softmax)
    signature = "x, lower=0.125, upper=0.3333333333333333, training=False, generator=None"
    routed(table, torch.rrelu, signature, _rrelu(in_place=False))
    routed(table, torch.rrelu_, signature, _rrelu(in_place=True))
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

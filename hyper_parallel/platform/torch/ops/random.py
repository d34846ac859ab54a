"""PyTorch's functions that draw random numbers: operators' rules draw one number per element of the global tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.dtensor.sampling import LocalRandomNumbers
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, nn, spelling

# -- operators whose rule samples --------------------------------------------------------------------------------------

spelling("uniform", Tensor.uniform_, aten.uniform_.default)
spelling("normal", Tensor.normal_, aten.normal_.default)
spelling("bernoulli_fill", Tensor.bernoulli_, aten.bernoulli_.float)
spelling("exponential", Tensor.exponential_, aten.exponential_.default)
spelling("cauchy", Tensor.cauchy_, aten.cauchy_.default)
spelling("geometric", Tensor.geometric_, aten.geometric_.default)
spelling("log_normal", Tensor.log_normal_, aten.log_normal_.default)
spelling("multinomial", "multinomial", aten.multinomial.default)
spelling("normal_around", torch.normal, aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
spelling("rand_like", torch.rand_like, aten.rand_like.default)
spelling("randn_like", torch.randn_like, aten.randn_like.default)
spelling("bernoulli", "bernoulli", aten.bernoulli.default)


@kernel(
    "uniform", "normal", "bernoulli_fill", "random_fill", "exponential", "cauchy", "geometric", "log_normal",
    "multinomial", "normal_around",
)  # fmt: skip
def _sampled_by_rule(*_: Any, **__: Any) -> Any:
    msg = "random operators are sampled by their rule"
    raise AssertionError(msg)


@kernel("rand_like")
def _rand_like(x: Tensor, **_: Any) -> Tensor:
    return torch.rand_like(x)


@kernel("randn_like")
def _randn_like(x: Tensor, **_: Any) -> Tensor:
    return torch.randn_like(x)


@kernel("randint_like")
def _randint_like(x: Tensor, low: int, high: int, dtype: Any, **_: Any) -> Tensor:
    return torch.randint_like(x, low, high, dtype=dtype)


@kernel("bernoulli")
def _bernoulli(x: Tensor, generator: Any) -> Tensor:
    return torch.bernoulli(x, generator=generator)


@decomposition(
    torch.randint_like,
    signature="x, low, high=None, *, dtype=None, layout=None, device=None, pin_memory=None, requires_grad=False, "
    "memory_format=None",
)
def _randint_like_below(ops: Any, x: Any, low: int, high: int | None, dtype: Any, **_: Any) -> Any:
    return ops.randint_like(x, *((0, low) if high is None else (low, high)), dtype=dtype)


def _no_grad(write: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return write(*args)


@decomposition(torch.nn.init.normal_, signature="tensor, mean=0.0, std=1.0, generator=None")
def _init_normal(_ops: Any, tensor: Any, mean: float, std: float, **_: Any) -> Any:
    return _no_grad(tensor.normal_, mean, std)


@decomposition(torch.nn.init.uniform_, signature="tensor, a=0.0, b=1.0, generator=None")
def _init_uniform(_ops: Any, tensor: Any, a: float, b: float, **_: Any) -> Any:
    return _no_grad(tensor.uniform_, a, b)


# -- uses of sampled numbers in rules --------------------------------------------------------------------------------


@kernel("write")
def _write(x: Tensor, sampled: LocalRandomNumbers, dtype: Any) -> Tensor:
    """Write into the memory of ``x``, block after block, unless autograd has to record it."""
    del dtype
    if x.is_contiguous() and not (x.requires_grad and torch.is_grad_enabled()):
        _fill(x.detach(), sampled)
        return x
    return x.copy_(_fill(torch.empty(sampled.shape, dtype=x.dtype, device=x.device), sampled))


@kernel("make_like")
def _make_like(x: Tensor, sampled: LocalRandomNumbers, dtype: Any) -> Tensor:
    return _fill(torch.empty(sampled.shape, dtype=x.dtype if dtype is None else dtype, device=x.device), sampled)


def _fill(x: Tensor, sampled: LocalRandomNumbers) -> Tensor:
    """Copy the numbers into a contiguous tensor."""
    recorded = getattr(sampled, "tensor", None)  # in a traced graph: numbers are drawn when it runs
    if recorded is not None:
        return x.copy_(recorded(x.device))
    places = x.view(sampled.rows)
    for rows, columns, values in () if x.is_meta else sampled.blocks():
        places[rows, columns].copy_(torch.from_numpy(values))
    return x


@kernel("cast_as")
def _cast_as(x: Tensor, other: Tensor) -> Tensor:
    return x.to(other.dtype)


@kernel("pick")
def _pick(x: Tensor, sampled: Tensor, num_samples: int, replacement: bool) -> Tensor:
    """Sample indices by weight: without replacement by exponential races, else by the running sum of weights."""
    weights = x.double()
    positive = weights > 0
    if bool((weights < 0).any()) or not bool(weights.isfinite().all()) or not bool(positive.any(-1).all()):
        msg = "multinomial: weights must be finite, not negative, and not all zero"
        raise RuntimeError(msg)
    if replacement:
        running = weights.cumsum(-1)
        picked = torch.searchsorted(running, sampled * running[..., -1:], right=True)
        places = torch.arange(x.shape[-1], device=x.device).expand_as(x)
        return picked.minimum(torch.where(positive, places, 0).amax(-1, keepdim=True))
    if bool((positive.sum(-1) < num_samples).any()):
        msg = f"multinomial: fewer than {num_samples} weights are positive, and none may be drawn twice"
        raise RuntimeError(msg)
    return torch.where(positive, weights / -torch.log1p(-sampled), -1.0).topk(num_samples, -1).indices


# -- dropouts ----------------------------------------------------------------------------------------------------------


@kernel("dropout")
def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(x, p, training)


@decomposition(F.dropout, signature="x, p=0.5, training=True, inplace=False")
def _dropout_call(ops: Any, x: Any, p: float, training: bool, inplace: bool) -> Any:
    dropped = ops.dropout(x, p, training)
    return x.copy_(dropped) if inplace and dropped is not x and training else dropped


@decomposition(torch.dropout, signature="x, p, train")
def _dropout_in_training(ops: Any, x: Any, p: float, train: bool) -> Any:
    return ops.dropout(x, p, train)


@decomposition(torch.dropout_, signature="x, p, train")
def _dropout_in_place(ops: Any, x: Any, p: float, train: bool) -> Any:
    return x.copy_(ops.dropout(x, p, train)) if train else x


# Returns a factor and a term for a tensor, of which each element is dropped with probability p.
FactorAndTerm = Callable[[Any, float], tuple[Any, Any]]


def _affine_dropout(name: str) -> Callable[[FactorAndTerm], FactorAndTerm]:
    """Define ``torch.<name>`` and ``torch.<name>_`` as ``x`` times the factor plus the term that a function samples."""

    def declare(sample: FactorAndTerm) -> FactorAndTerm:
        @decomposition(getattr(torch, name), signature="x, p, train")
        def run(_ops: Any, x: Any, p: float, train: bool) -> Any:
            if not train or p == 0.0:
                return x
            factor, term = sample(x.detach(), p)
            return x * factor if term is None else x * factor + term

        @decomposition(getattr(torch, f"{name}_"), signature="x, p, train")
        def write(_ops: Any, x: Any, p: float, train: bool) -> Any:
            if not train or p == 0.0:
                return x
            factor, term = sample(x.detach(), p)
            x.mul_(factor)
            return x if term is None else x.add_(term)

        return sample

    return declare


@_affine_dropout("feature_dropout")
def _feature_dropout(x: Any, p: float) -> tuple[Any, Any]:
    """Drop complete channels: one number per sample and channel."""
    return _keep_mask(x, p, channels=True) * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), None


SATURATION = 1.7580993408473766  # SELU tends to minus this value, with which alpha dropout replaces elements


def _saturating(x: Any, p: float, *, channels: bool) -> tuple[Any, Any]:
    """Dropped elements saturate; scale and shift keep mean and variance."""
    if p == 1.0:
        return torch.zeros_like(x), None
    mask = _keep_mask(x, p, channels=channels)
    scale = ((SATURATION * SATURATION * p + 1.0) * (1.0 - p)) ** -0.5
    return mask * scale, (mask - 1.0) * (SATURATION * scale) + SATURATION * scale * p


@_affine_dropout("alpha_dropout")
def _alpha_dropout(x: Any, p: float) -> tuple[Any, Any]:
    return _saturating(x, p, channels=False)


@_affine_dropout("feature_alpha_dropout")
def _feature_alpha_dropout(x: Any, p: float) -> tuple[Any, Any]:
    return _saturating(x, p, channels=True)


def _keep_mask(x: Any, p: float, *, channels: bool) -> Any:
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


# -- activations that sample -------------------------------------------------------------------------------------------

_RRELU = "x, lower=0.125, upper=0.3333333333333333, training=False, generator=None"


@decomposition(torch.rrelu, signature=_RRELU)
def _rrelu(_ops: Any, x: Any, lower: float, upper: float, training: bool, **_: Any) -> Any:
    """A slope per element below zero: sampled, or the middle of the range."""
    if not training:
        return nn.leaky_relu(x, (lower + upper) / 2.0)
    slope = torch.empty_like(x).uniform_(lower, upper)
    return torch.where(x > 0, x, x * slope)


@decomposition(torch.rrelu_, signature=_RRELU)
def _rrelu_in_place(_ops: Any, x: Any, lower: float, upper: float, training: bool, **_: Any) -> Any:
    if not training:
        return nn.leaky_relu_(x, (lower + upper) / 2.0)
    slope = torch.empty_like(x).uniform_(lower, upper)
    return x.mul_(torch.where(x.detach() > 0, torch.ones_like(slope), slope))


@decomposition(F.gumbel_softmax, signature="logits, tau=1, hard=False, eps=1e-10, dim=-1")
def _gumbel_softmax(_ops: Any, logits: Any, tau: float, hard: bool, eps: float, dim: int) -> Any:
    """Softmax of logits with noise; hard results are one-hot and have the gradient of soft results."""
    del eps  # PyTorch does not use it either
    # The smallest number keeps the logarithm finite.
    sampled = torch.empty_like(logits).uniform_(torch.finfo(logits.dtype).tiny, 1.0)
    noise = -(-torch.log1p(-sampled)).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(soft).scatter(dim, index, 1.0) - soft.detach() + soft

"""Random operators of MindSpore; each number depends only on the global index of its element."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, ops

from hyper_parallel.core.dtensor.sampling import LocalRandomNumbers
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.kernels import sampled, write_over
from hyper_parallel.platform.mindspore.ops.registry import decomposition, kernel, spelling

__all__: list[str] = []

spelling("rand_like", "RandLikeExt", signature="x, seed=None, offset=None, dtype=None, device=None")
spelling("randn_like", "RandnLike", signature="x, seed=None, offset=None, dtype=None, device=None")
spelling("randint_like", "RandIntLike", signature="x, low, high, seed=None, offset=None, dtype=None, device=None")
spelling("multinomial", "MultinomialExt", signature="x, num_samples, replacement=False, seed=None, offset=None")
spelling("bernoulli", "BernoulliExt", signature="x, seed=None, offset=None")
spelling("uniform", "InplaceUniform", signature="x, low=0.0, high=1.0, seed=None, offset=None", in_place=True)
spelling("normal", "InplaceNormal", signature="x, mean=0.0, std=1.0, seed=None, offset=None", in_place=True)
spelling("bernoulli_fill", "InplaceBernoulliScalar", signature="x, p=0.5, seed=None, offset=None", in_place=True)

# -- kernels -----------------------------------------------------------------------------------------------------------


@kernel(
    "dropout", "uniform", "normal", "bernoulli_fill", "random_fill", "rand_like", "randn_like", "multinomial",
    "randint_like", "bernoulli", reliable_on_empty=True, writes=True,
)  # fmt: skip
def _sampled_by_rule(*_: Any, **__: Any) -> Any:
    """Raise an error: the rules of these operators sample with the kernels below."""
    msg = "random operators are sampled by their rule, which needs a DTensor"
    raise UnsupportedOperatorError(msg)


kernel("cast_as")(lambda x, other: ops.cast(x, other.dtype))
kernel("make_like")(lambda x, numbers, dtype: sampled(numbers, x.dtype if dtype is None else dtype))


@kernel("write", reliable_on_empty=True, writes=True)
def _write(x: Tensor, numbers: LocalRandomNumbers, dtype: Any) -> Tensor:
    del dtype
    write_over(x, sampled(numbers, x.dtype))  # an empty shard, too: every rank must have the same graph
    return x


@kernel("pick", reliable_on_empty=True)
def _pick(x: Tensor, drawn: Tensor, num_samples: int, replacement: bool) -> Tensor:
    """Sample indices by weight: without replacement by exponential races, else by the running sum of weights."""
    weights, numbers = x.asnumpy().astype(np.float64), drawn.asnumpy()
    positive = weights > 0
    if (weights < 0).any() or not np.isfinite(weights).all() or not positive.any(-1).all():
        msg = "multinomial: weights must be finite, not negative, and not all zero"
        raise RuntimeError(msg)
    if replacement:
        running = weights.cumsum(-1)
        indices = (running[..., None, :] <= (numbers * running[..., -1:])[..., None]).sum(-1)
        last = np.where(positive, np.arange(weights.shape[-1]), 0).max(-1, keepdims=True)
        return Tensor(np.minimum(indices, last).astype(np.int64))
    if (positive.sum(-1) < num_samples).any():
        msg = f"multinomial: fewer than {num_samples} weights are positive, and none may be drawn twice"
        raise RuntimeError(msg)
    arrivals = np.where(positive, weights / -np.log1p(-numbers), -1.0)
    return Tensor(np.argsort(-arrivals, -1, kind="stable")[..., :num_samples].astype(np.int64))


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("FuncDropoutExt")
def _dropout(ops: Any, _: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *__: Any) -> Any:
    """Drop elements by numbers that depend on their global index; MindSpore's seed and offset are not used."""
    dropped = ops.dropout(x, p, training)
    return x.copy_(dropped) if inplace else dropped


@decomposition("Dropout")
def _dropout_with_mask(ops: Any, primitive: Any, x: Any, *_: Any) -> Any:
    """Return the result of dropout and its mask, as the legacy primitive does; layers ignore the mask."""
    mask = ops.dropout(ops.ones_like(x), 1 - primitive.keep_prob, True)
    return ops.mul(x, mask), ops.cast(ops.ne(mask, 0), dtype=x.dtype)


@decomposition("DropoutGenMask", "DropoutDoMask")
def _dropout_by_bits(*_: Any, **__: Any) -> Any:
    msg = "dropout by bit masks has no sharding rule; use mint.nn.functional.dropout"
    raise UnsupportedOperatorError(msg)


@decomposition("Dropout2dExt")
def _dropout2d(ops: Any, _: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *__: Any) -> Any:
    """Drop complete channels."""
    dropped = ops.mul(x, _channel_factors(ops, x, p)) if training else x
    return x.copy_(dropped) if inplace else dropped


@decomposition("Dropout2D", "Dropout3D")
def _channel_dropout_with_mask(ops: Any, primitive: Any, x: Any, *_: Any) -> Any:
    """Drop complete channels; return the mask as well, as the legacy primitives do."""
    kept = _channel_factors(ops, x, 1 - primitive.keep_prob)
    return ops.mul(x, kept), ops.expand(ops.ne(kept, 0), tuple(x.shape))


def _channel_factors(ops: Any, x: Any, p: float) -> Any:
    ones = ops.new_ones(x, (*x.shape[:2], *(1,) * (len(x.shape) - 2)))
    return ops.dropout(ones, p, True)

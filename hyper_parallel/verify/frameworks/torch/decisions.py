"""Records, and can replace, the indices that top-k, sorting, argmax, argmin and max-pooling of PyTorch choose.

These operators are replaced while a program is recorded. If the chosen indices are replaced by those of the reference,
the returned values are gathered at the new indices. The result of max-pooling is a continuous function of its input,
but its gradient is not, because it goes to one element of each window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

__all__ = ["OPERATORS", "POOLS", "decided", "pooled"]

_METHODS = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min")
OPERATORS = tuple((owner, name) for owner in (torch, torch.Tensor) for name in _METHODS)
"""Owners and names of the operators."""

POOLS = (
    *((torch, f"max_pool{dims}d") for dims in (1, 2, 3)),
    *((nn.functional, f"{kind}max_pool{dims}d_with_indices") for kind in ("", "adaptive_") for dims in (1, 2, 3)),
)
"""Owners and names of the max-pooling operators; functions such as ``max_pool2d`` call those ``_with_indices``."""

_SIZE = 1 << 24
"""Maximum number of elements of a recorded choice."""


def decided(
    plain: Callable[..., Any],
    name: str,
    record: Callable[[str, Any, Any, int], Any | None],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call an operator and record its choice; return its result, with the indices that ``record`` returns, if any.

    Args:
        plain: the operator.
        name: a name in ``OPERATORS``.
        record: called with the name, the scores, the chosen indices, and the dim along which they were chosen.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
    """
    result = plain(*args, **kwargs)
    scores = args[0] if args else kwargs.get("input")
    if type(scores) is not torch.Tensor and type(scores) is not torch.nn.Parameter:
        return result
    indices = result if isinstance(result, torch.Tensor) else getattr(result, "indices", None)
    if (
        not scores.is_floating_point()
        or scores.layout is not torch.strided
        or scores.is_meta
        or not 1 < scores.numel() <= _SIZE
        or "out" in kwargs
        or indices is None
        or indices.dtype != torch.int64
    ):
        return result
    dim = _dim(name, args[1:], kwargs)
    flat = dim is None
    rows = scores.reshape(-1) if flat else scores
    along = 0 if dim is None else dim
    dropped = indices.dim() < rows.dim()
    full = indices.reshape(1) if flat else indices.unsqueeze(along) if dropped else indices
    other = record(name, rows, full, along)
    if other is None:
        return result
    chosen = other.reshape(indices.shape) if flat else other.squeeze(along) if dropped else other
    if isinstance(result, torch.Tensor):
        return chosen
    values = torch.gather(scores, along, other)
    return type(result)((values.squeeze(along) if dropped else values, chosen))


def pooled(
    plain: Callable[..., Any],
    name: str,
    record: Callable[[str, Any, Any, int], Any | None],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Do the same as :func:`decided` for an operator of ``POOLS``, which chooses one element of each window.

    Args:
        plain: the operator.
        name: a name in ``POOLS``.
        record: called with the name, one row of numbers per sample, the indices of the maxima in each row, and dim 1.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
    """
    numbers = args[0] if args else kwargs.get("input")
    if (
        type(numbers) is not torch.Tensor
        or not (torch.is_grad_enabled() and numbers.requires_grad)
        or numbers.is_meta
        or not 1 < numbers.numel() <= _SIZE
    ):
        return plain(*args, **kwargs)
    if not name.endswith("_with_indices"):
        return getattr(nn.functional, f"{name}_with_indices")(*args, **kwargs)[0]
    values, indices = plain(*args, **kwargs)
    kind = name.removesuffix("_with_indices")
    dims = int(kind[-2])
    channels = numbers.shape[-dims - 1]
    starts = torch.arange(channels, device=indices.device) * prod(numbers.shape[-dims:])
    starts = starts.reshape(channels, *(1,) * dims)
    samples = numbers.reshape(len(numbers) if numbers.dim() == dims + 2 else 1, -1)
    other = record(kind, samples, (indices + starts).reshape(len(samples), -1), 1)
    if other is None:
        return values, indices
    return samples.gather(1, other).reshape(values.shape), other.reshape(indices.shape) - starts


def _dim(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Return the dim along which an operator chooses; None if it chooses among all elements."""
    if "dim" in kwargs:
        dim: int | None = kwargs["dim"]
        return dim
    place = 1 if name == "topk" else 0
    if len(args) > place and (args[place] is None or type(args[place]) is int):
        return args[place]
    return None if name in {"argmax", "argmin"} else -1

"""Records on which side of a threshold numbers are, for operators such as ReLU, comparisons, signs, clamps and buckets.

The result or gradient of these operators of PyTorch jumps at a threshold. They are replaced while a program is
recorded. If rounding moved a number across its nearest threshold, compared with the reference, the number can be
mirrored at the threshold; this change has the size of a rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["OPERATORS", "sided"]

_COMPARISONS = ("gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__")
_JUMPS = (*_COMPARISONS, "sign", "bucketize")
"""Operators whose results are discontinuous; for all others, only the gradient is discontinuous."""

_AT_ZERO = ("relu", "relu_", "leaky_relu", "abs", "sign")
_BETWEEN = ("clamp", "hardtanh", "relu6")
_NAMES = ("relu", "relu_", "abs", "sign", "clamp", "maximum", "minimum", "gt", "ge", "lt", "le")

OPERATORS = (
    *((owner, name) for owner in (torch, torch.Tensor) for name in _NAMES),
    *((torch.Tensor, name) for name in _COMPARISONS[4:]),
    *((nn.functional, name) for name in ("leaky_relu", "hardtanh", "relu6")),
    (torch, "bucketize"),
)
"""Owners and names of the operators."""

_SIZE = 1 << 22
"""Maximum number of elements whose sides are recorded."""


def sided(
    plain: Callable[..., Any],
    name: str,
    record: Callable[[str, Any, Any], Any | None],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Record on which side of a threshold an operator's numbers are, and call the operator.

    Numbers for which ``record`` returns the opposite side are first mirrored at the threshold.

    Args:
        plain: the operator.
        name: a name in ``OPERATORS``.
        record: called with the name, the distances from the nearest threshold, and a mask of the numbers above it;
            returns the mask to use instead, or None.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
    """
    numbers: Any = args[0] if args else None
    if (
        not args
        or not _is_plain(numbers)
        or not 1 < numbers.numel() <= _SIZE
        or not (name in _JUMPS or (torch.is_grad_enabled() and numbers.requires_grad))
        or "out" in kwargs
    ):
        return plain(*args, **kwargs)
    with torch.no_grad():
        values = numbers.detach()
        threshold = _threshold(name, values, args[1:], kwargs)
        if threshold is None:
            return plain(*args, **kwargs)
        above, distance = values > threshold, (values - threshold).abs()
    if above.shape != values.shape:
        return plain(*args, **kwargs)
    expected = record(name, distance, above)
    if expected is None:
        return plain(*args, **kwargs)
    with torch.no_grad():
        twice = 2 * (threshold - values)
        least = torch.finfo(values.dtype).tiny * (2 * expected.to(values.dtype) - 1)
        moves = torch.where(expected != above, torch.where(twice == 0, least, twice), 0).to(values.dtype)
    mirrored = numbers.add_(moves) if name == "relu_" else numbers + moves
    return plain(mirrored, *args[1:], **kwargs)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense floating-point tensor, neither on the meta device nor of a subclass."""
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.is_floating_point()
        and value.layout is torch.strided
        and not value.is_meta
    )


def _threshold(name: str, values: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
    """Return the threshold nearest to each number, as a tensor or a number; None if there is none."""
    if name in _AT_ZERO:
        return 0.0
    if name == "bucketize":
        return _nearest_edge(values, kwargs.get("boundaries", *args[:1]))
    if name in _BETWEEN:
        return _nearest_end(name, values, args, kwargs)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        plain = type(other) in (torch.Tensor, nn.Parameter) and other.layout is torch.strided and not other.is_meta
        return other.detach() if plain else None
    return other if isinstance(other, (int, float)) else None


def _nearest_edge(values: torch.Tensor, edges: Any) -> torch.Tensor | None:
    if not isinstance(edges, torch.Tensor) or not edges.numel():
        return None
    last = edges.numel() - 1
    upper = torch.searchsorted(edges, values.contiguous()).clamp_(0, last)
    above, below = edges[upper], edges[(upper - 1).clamp_(0, last)]
    return torch.where((values - below).abs() <= (above - values).abs(), below, above)


def _nearest_end(name: str, values: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
    low, high = {"hardtanh": (-1.0, 1.0), "relu6": (0.0, 6.0)}.get(name, (None, None))
    if name != "relu6":
        low, high = (
            args[place]
            if len(args) > place
            else kwargs.get("min" if name == "clamp" else "min_val", low)
            if place == 0
            else kwargs.get("max" if name == "clamp" else "max_val", high)
            for place in (0, 1)
        )
    ends = [end for end in (low, high) if isinstance(end, (int, float))]
    if not ends or any(isinstance(end, torch.Tensor) for end in (low, high)):
        return None
    if len(ends) == 1:
        return ends[0]
    return torch.where((values - ends[0]).abs() <= (values - ends[1]).abs(), ends[0], ends[1])

"""Operators of PyTorch that choose indices by comparing numbers: top-k, sorting, the place of an extremum.

Each is replaced while a program is recorded. The indices that it chose can be replaced by those of the reference; the
values that it returns are then gathered with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["OPERATORS", "decided"]

_METHODS = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min")
OPERATORS = tuple((owner, name) for owner in (torch, torch.Tensor) for name in _METHODS)
"""Where the operators stand, and their names."""

_SIZE = 1 << 24
"""Most elements of which a choice is recorded."""


def decided(
    plain: Callable[..., Any],
    name: str,
    record: Callable[[str, Any, Any, int], Any | None],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call an operator, record its choice, and return its result; with other indices, if ``record`` returns some.

    Args:
        plain: the operator.
        name: of ``OPERATORS``.
        record: gets the name, the scores, the indices and their dim.
        args: of the call.
        kwargs: of the call.
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


def _dim(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Return the dim along which an operator chooses; None for all elements."""
    if "dim" in kwargs:
        dim: int | None = kwargs["dim"]
        return dim
    place = 1 if name == "topk" else 0
    if len(args) > place and (args[place] is None or type(args[place]) is int):
        return args[place]
    return None if name in {"argmax", "argmin"} else -1

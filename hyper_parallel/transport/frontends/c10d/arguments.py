"""Arguments of collectives, which may be tensors or lists of them, options or plain values; and checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Ranks

__all__ = [
    "Tensors",
    "check_count",
    "check_same",
    "described",
    "inner",
    "listed",
    "op_of",
    "private_copy",
    "root_of",
    "write",
]

Tensors = Sequence[torch.Tensor]


def listed(tensors: Any) -> list[torch.Tensor]:
    """Return tensors as a list; a single tensor is its only item."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def inner(lists: Any) -> list[torch.Tensor]:
    """Return the first list in ``lists``, ``lists`` itself if it has tensors, or an empty list."""
    first = lists[0] if lists else []
    return list(first if isinstance(first, list | tuple) else lists)


def op_of(opts: Any) -> Any:
    """Return the reduction, which is passed in options or by itself; a sum by default."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def root_of(opts: Any) -> int:
    """Return the root, which is passed in options or by itself."""
    return int(getattr(opts, "rootRank", opts) or 0)


def private_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares no memory with ``x``."""
    if x.layout is torch.strided:
        return x.detach().clone(memory_format=torch.contiguous_format)
    return x.detach().coalesce().clone()


def write(places: Tensors, values: Tensors) -> list[torch.Tensor]:
    """Write each value into its place without autograd; return the places."""
    for place, value in zip(places, values, strict=True):
        if place.layout is torch.strided:
            place.data.copy_(value)
        else:
            with torch.no_grad():
                place.copy_(value)
    return list(places)


def check_count(name: str, chunks: Sequence[Any], ranks: Ranks) -> None:
    """Raise an error unless there is one tensor for each member."""
    if len(chunks) != len(ranks):
        msg = f"{name} over {len(ranks)} ranks got {len(chunks)} tensors; it takes one for each"
        raise CollectiveMismatchError(msg)


def check_same(name: str, outputs: Tensors, inputs: Tensors) -> None:
    """Check that each output has the shape and dtype of its input."""
    for output, x in zip(outputs, inputs, strict=True):
        if output.shape != x.shape or output.dtype != x.dtype:
            msg = f"{name}: an output is {described(output)} and its input {described(x)}; they must be the same"
            raise CollectiveMismatchError(msg)


def described(x: torch.Tensor) -> str:
    """``float32[2, 3]``."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"

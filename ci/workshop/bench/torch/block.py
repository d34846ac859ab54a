"""A transformer block for the benchmark: written by hand, with PyTorch's DTensors and with ours.

It is small, so that what is measured is the host's cost. By hand means local tensors, and autograd functions with the
collectives at the boundaries of the tensor-parallel regions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed import tensor as peer

import hyper_parallel
from hyper_parallel.core.dtensor.placements import Replicate, Shard

__all__ = ["blocks", "compiled_block"]

_HEADS, _LENGTH, _WIDTH, _HIDDEN = 8, 32, 128, 256
Boundary = Callable[[Any], Any]


def blocks(size: int, tensors: Callable[..., Any], *, sequence_parallel: bool = False) -> list[Callable[[], None]]:
    """Return forward and backward of the block by hand, with PyTorch's DTensors and with ours.

    Args:
        size: number of ranks.
        tensors: ``tensors(dim, *local_shape, grad=...)`` makes the same local values plain and as both DTensors.
        sequence_parallel: activations are sharded along the sequence outside of the tensor-parallel regions; then
            hand-written code sums the gradients of the norms' weights.
    """
    weights, heads = _weights(size, tensors), max(_HEADS, size)
    length = max(_LENGTH, size) // size if sequence_parallel else _LENGTH
    x, seed = (tensors(1 if sequence_parallel else None, 2, length, _WIDTH, grad=flag) for flag in (True, False))
    enter, leave = (_Gather.apply, _Scatter.apply) if sequence_parallel else (_Copy.apply, _Reduce.apply)

    def by_hand() -> None:
        own = weights[0]
        if sequence_parallel:
            own = {name: _Copy.apply(value) if name in _NORMS else value for name, value in own.items()}
        _block(x[0], own, heads // size, enter, leave).backward(seed[0])

    def distributed_(index: int, whole: Any, outside: Any) -> Callable[[], None]:
        gather = _same if outside is whole else _redistributing(whole)
        scatter = _redistributing(outside)
        return lambda: _block(x[index], weights[index], heads, gather, scatter).backward(seed[index])

    theirs, ours = peer.Replicate(), Replicate()
    outside = (peer.Shard(1), Shard(1)) if sequence_parallel else (theirs, ours)
    return [by_hand, distributed_(1, theirs, outside[0]), distributed_(2, ours, outside[1])]


class _Module(nn.Module):
    """The block with our DTensors, as a module."""

    def __init__(self, weights: dict[str, Any], heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Any) -> Any:
        """Return the block's output."""
        return _block(x, self._parameters, self.heads, _redistributing(Replicate()), _redistributing(Shard(1)))


def compiled_block(size: int, tensors: Callable[..., Any]) -> list[Callable[[], None]]:
    """Return forward and backward of the sequence-parallel block by hand, and compiled; see :func:`blocks`."""
    length = max(_LENGTH, size) // size
    x, seed = (tensors(1, 2, length, _WIDTH, grad=flag)[2] for flag in (True, False))
    module = hyper_parallel.compile(_Module(_weights(size, tensors)[2], max(_HEADS, size)))
    return [blocks(size, tensors, sequence_parallel=True)[0], lambda: module(x).backward(seed)]


_NORMS = ("g1", "b1", "g2", "b2")


def _weights(size: int, tensors: Callable[..., Any]) -> list[dict[str, Any]]:
    """Weights of the three implementations: sharded by columns, by rows, and replicated."""
    names = ("wq", "wk", "wv", "wo", "up", "down", *_NORMS)
    parts = (
        *(tensors(0, _WIDTH // size, _WIDTH, grad=True) for _ in range(3)),
        tensors(1, _WIDTH, _WIDTH // size, grad=True),
        tensors(0, _HIDDEN // size, _WIDTH, grad=True),
        tensors(1, _WIDTH, _HIDDEN // size, grad=True),
        *(tensors(None, _WIDTH, grad=True) for _ in _NORMS),
    )
    return [dict(zip(names, (part[index] for part in parts), strict=True)) for index in range(3)]


def _block(x_bsd: Any, w: dict[str, Any], heads: int, enter: Boundary, leave: Boundary) -> Any:
    """Attention and MLP; ``enter`` and ``leave`` are the boundaries of the tensor-parallel regions."""
    h = enter(F.layer_norm(x_bsd, (_WIDTH,), w["g1"], w["b1"]))
    batch, sequence, _ = h.shape
    q, k, v = (F.linear(h, w[name]).view(batch, sequence, heads, -1).transpose(1, 2) for name in ("wq", "wk", "wv"))
    scores = torch.softmax(q @ k.transpose(-2, -1) * 0.35, dim=-1)
    mixed = (scores @ v).transpose(1, 2).reshape(batch, sequence, -1)
    x_bsd = x_bsd + leave(F.linear(mixed, w["wo"]))
    h = enter(F.layer_norm(x_bsd, (_WIDTH,), w["g2"], w["b2"]))
    return x_bsd + leave(F.linear(F.gelu(F.linear(h, w["up"])), w["down"]))


def _summed(x: Tensor) -> Tensor:
    total = x.clone()
    distributed.all_reduce(total)
    return total


def _gathered(shard: Tensor) -> Tensor:
    """The whole sequence, dim 1."""
    parts = shard.new_empty(distributed.get_world_size() * shard.shape[0], *shard.shape[1:])
    distributed.all_gather_into_tensor(parts, shard.contiguous())
    return torch.cat(parts.chunk(distributed.get_world_size()), 1)


def _scattered(partial: Tensor) -> Tensor:
    """This rank's part of the sequence, dim 1, of the sum."""
    size = distributed.get_world_size()
    mine = partial.new_empty(partial.shape[0], partial.shape[1] // size, *partial.shape[2:])
    distributed.reduce_scatter_tensor(mine, torch.cat(partial.chunk(size, 1)))
    return mine


def _same(x: Any) -> Any:
    return x


def _redistributing(placement: Any) -> Boundary:
    return lambda y: y.redistribute(placements=[placement])


def _boundary(name: str, forward: Boundary, backward: Boundary) -> Any:
    """An autograd function of one tensor."""
    members = {"forward": staticmethod(lambda _, x: forward(x)), "backward": staticmethod(lambda _, g: backward(g))}
    return type(name, (torch.autograd.Function,), members)


_Copy = _boundary("_Copy", _same, _summed)
_Reduce = _boundary("_Reduce", _summed, _same)
_Gather = _boundary("_Gather", _gathered, _scattered)
_Scatter = _boundary("_Scatter", _scattered, _gathered)

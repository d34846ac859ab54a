"""Redistributions for the benchmark: written by hand, by PyTorch's DTensor and by ours, on a world of any size.

A shard has 64 elements, so that what is measured is the host's cost and not that of memory, except that the whole of
512 ranks has 128 KiB. By hand means what a program writes first: ``chunk``, one collective on a tensor, ``cat``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import tensor as peer

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard

__all__ = ["CASES", "redistributions"]

CASES = 3
"""The number of redistributions that :func:`redistributions` yields."""

Calls = list[Callable[[], Any]]  # by hand, PyTorch's DTensor, ours


def redistributions(size: int, peer_mesh: Any, mesh: Any) -> Iterator[tuple[str, Calls]]:
    """Yield each redistribution by its name, as calls on a world of ``size`` ranks.

    Args:
        size: number of ranks.
        peer_mesh: PyTorch's mesh of them.
        mesh: ours, on whose device the tensors are.
    """
    random = partial(torch.randn, device=mesh.device_type)

    def calls(local: Tensor, by_hand: Callable[[Tensor, int], Tensor], *pairs: tuple[Any, Any]) -> Calls:
        (theirs, to), (ours, ours_to) = pairs
        there = peer.DTensor.from_local(local, peer_mesh, [theirs], run_check=False)
        here = DTensor.from_local(local, mesh, [ours])
        return [
            lambda: by_hand(local, size),
            lambda: there.redistribute(placements=[to]),
            lambda: here.redistribute(placements=[ours_to]),
        ]

    yield (
        f"partial to shard(1), {size} ranks",
        calls(random(8, 8 * size), _scattered, (peer.Partial(), peer.Shard(1)), (Partial(), Shard(1))),
    )
    yield (
        f"shard(1) to replicate, {size} ranks",
        calls(random(8, 8), _gathered, (peer.Shard(1), peer.Replicate()), (Shard(1), Replicate())),
    )
    yield (
        f"shard(1) to shard(2), {size} ranks",
        calls(random(4, 4, 4 * size), _exchanged, (peer.Shard(1), peer.Shard(2)), (Shard(1), Shard(2))),
    )


def _scattered(partial: Tensor, size: int) -> Tensor:
    """Reduce-scatter along the second dim."""
    mine = partial.new_empty(partial.shape[0], partial.shape[1] // size)
    distributed.reduce_scatter_tensor(mine, torch.cat(partial.chunk(size, 1)))
    return mine


def _gathered(shard: Tensor, size: int) -> Tensor:
    """All-gather along the second dim."""
    parts = shard.new_empty(size * shard.shape[0], *shard.shape[1:])
    distributed.all_gather_into_tensor(parts, shard)
    return torch.cat(parts.chunk(size), 1)


def _exchanged(shard: Tensor, size: int) -> Tensor:
    """All-to-all from the second dim to the third."""
    sent = torch.cat(shard.chunk(size, 2))
    arrived = torch.empty_like(sent)
    distributed.all_to_all_single(arrived, sent)
    return torch.cat(arrived.chunk(size), 1)

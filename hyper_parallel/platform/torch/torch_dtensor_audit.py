"""PyTorch's own DTensor as a target of the operator audit: wrapping, differentiation, global values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import tensor as peer
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard

__all__ = ["Peer"]


class Peer:
    """One process of a one-dimensional mesh that runs PyTorch's own DTensor.

    Args:
        rank: rank of this process.
        world: number of processes.
        store: the file of the rendezvous.
        seconds: the timeout of collectives.
    """

    def __init__(self, rank: int, world: int, store: str, seconds: float) -> None:
        self.world = world
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
        )
        self.mesh = init_device_mesh("cpu", (world,))

    def close(self) -> None:
        """Destroy the process group."""
        distributed.destroy_process_group()

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order."""
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def wrap(self, local: Any, placement: Placement, shape: Sequence[int], *, differentiated: bool = False) -> Any:
        """Return a leaf of global ``shape`` whose local array on this rank is ``local``."""
        theirs: Any = peer.Replicate()
        if isinstance(placement, Shard):
            theirs = peer.Shard(placement.dim)
        elif isinstance(placement, Partial):
            theirs = peer.Partial(placement.reduce_op)
        wrapped = peer.DTensor.from_local(
            torch.from_numpy(local), self.mesh, [theirs], run_check=False,
            shape=torch.Size(shape), stride=torch.empty(tuple(shape)).stride(),
        )  # fmt: skip
        return wrapped.requires_grad_(differentiated)

    @staticmethod
    def call(
        run: Callable[[Sequence[Any]], Sequence[Any]], filled: Any, shards: Any, placements: Sequence[Placement]
    ) -> Any:
        """Record a call so that :meth:`program` can write it as source."""
        from hyper_parallel.platform.torch.torch_dtensor_reproducer import RecordedCall

        return RecordedCall(run, filled.arrays, shards, placements, filled.requires_grad)

    @staticmethod
    def program(call: Any, seeds: Any, gradient: bool, index: int, right: Any, before: Any = None) -> str | None:
        """Return a finding as a program of at most 15 lines, or None; see ``torch_dtensor_reproducer.program``."""
        from hyper_parallel.platform.torch.torch_dtensor_reproducer import Finding, program

        return program(Finding(call, seeds, gradient, index, right), before)

    @staticmethod
    def is_wrapped(value: Any) -> bool:
        """Whether ``value`` is distributed."""
        return isinstance(value, peer.DTensor)

    @staticmethod
    def whole(value: Any) -> Any:
        """Return the global values as an array."""
        return value.detach().full_tensor().resolve_conj().resolve_neg().contiguous().numpy()

    @staticmethod
    def backward(outs: Sequence[Any], seeds: Sequence[Any]) -> None:
        """Differentiate outputs that have a seed and a gradient."""
        pairs = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if seed is not None and out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [seed for _, seed in pairs])

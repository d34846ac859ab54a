"""PyTorch's own DTensor, for the audit: to wrap, to differentiate, to see the whole."""

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
    """One rank of a line of processes.

    Args:
        rank: of this process.
        world: number of processes.
        store: file by which they meet.
        seconds: after which one that waits for another gives up.
    """

    def __init__(self, rank: int, world: int, store: str, seconds: float) -> None:
        self.world = world
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
        )
        self.mesh = init_device_mesh("cpu", (world,))

    def close(self) -> None:
        """Leave."""
        distributed.destroy_process_group()

    def gathered(self, mine: Any) -> list[Any]:
        """What every rank says."""
        seen: list[Any] = [None] * self.world
        distributed.all_gather_object(seen, mine)
        return seen

    def wrap(self, piece: Any, place: Placement, shape: Sequence[int], *, differentiated: bool = False) -> Any:
        """A leaf of global ``shape`` of which this rank holds ``piece``."""
        theirs: Any = peer.Replicate()
        if isinstance(place, Shard):
            theirs = peer.Shard(place.dim)
        elif isinstance(place, Partial):
            theirs = peer.Partial(place.reduce_op)
        found = peer.DTensor.from_local(
            torch.from_numpy(piece), self.mesh, [theirs], run_check=False,
            shape=torch.Size(shape), stride=torch.empty(tuple(shape)).stride(),
        )  # fmt: skip
        return found.requires_grad_(differentiated)

    @staticmethod
    def call(
        run: Callable[[Sequence[Any]], Sequence[Any]], filled: Any, pieces: Any, places: Sequence[Placement]
    ) -> Any:
        """A call that :meth:`program` can write down."""
        from hyper_parallel.platform.torch.peer_program import Call

        return Call(run, filled.arrays, pieces, places, filled.requires_grad)

    @staticmethod
    def program(call: Any, seeds: Any, gradient: bool, index: int, right: Any, before: Any = None) -> str | None:
        """A finding as a program of at most 15 lines, or None; see ``peer_program.program``."""
        from hyper_parallel.platform.torch.peer_program import Finding, program

        return program(Finding(call, seeds, gradient, index, right), before)

    @staticmethod
    def is_wrapped(value: Any) -> bool:
        """Whether it is distributed."""
        return isinstance(value, peer.DTensor)

    @staticmethod
    def whole(value: Any) -> Any:
        """The global values as an array."""
        return value.detach().full_tensor().resolve_conj().resolve_neg().contiguous().numpy()

    @staticmethod
    def backward(outs: Sequence[Any], seeds: Sequence[Any]) -> None:
        """Differentiate outputs that have a seed and a gradient."""
        pairs = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if seed is not None and out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [seed for _, seed in pairs])

"""Runs simulated ranks of PyTorch: each finds ``torch.distributed`` initialised, on the simulation's coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from hyper_parallel.platform.torch.versions import execution_engine
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.frontends.c10d.comm_debug import count_of_transport
from hyper_parallel.transport.frontends.c10d.forked_rank import rank_distributed
from hyper_parallel.transport.frontends.c10d.installation import INSTALLATION
from hyper_parallel.transport.frontends.c10d.rank_groups import RankGroups, current_rank
from hyper_parallel.transport.frontends.c10d.simulated_store import SimulatedStore
from hyper_parallel.transport.host.torch.ops import TorchOps
from hyper_parallel.transport.simulated.own_modules import OwnModules
from hyper_parallel.transport.simulated.threads import run_threads
from hyper_parallel.transport.simulated.transport import SimulatedTransport

__all__ = ["run_ranks"]


def run_ranks(body: Callable[[], Any], world_size: int, timeout: float, *, own_modules: bool = False) -> list[Any]:
    """:func:`run_threads` with PyTorch: every rank finds ``torch.distributed`` initialised.

    Args:
        body: the function that every rank runs.
        world_size: number of ranks, at least one.
        timeout: seconds after which the run is aborted.
        own_modules: whether each rank imports its own copies of the user's modules, ``__main__`` included.

    Raises:
        WorldFailedError: a rank raised, never finished, or left messages undelivered.
    """

    def calling() -> SimulatedTransport | None:
        rank = current_rank()
        return rank.transport if rank is not None and active_transport() is rank.transport else None

    store, everybody = SimulatedStore(calling), list[RankGroups]()

    def rank_body() -> Any:
        groups = RankGroups(cast("SimulatedTransport", active_transport()), store)
        groups.transport.count = count_of_transport
        everybody.append(groups)
        with INSTALLATION.rank(), rank_distributed(groups), _emptied_queue():
            result = body()
            if groups.transport.refused is not None:
                raise groups.transport.refused
            return result

    with INSTALLATION.run():
        try:
            if not own_modules:
                return run_threads(rank_body, world_size, TorchOps(), timeout)
            with OwnModules(TorchOps()) as ops:
                return run_threads(rank_body, world_size, ops, timeout)
        finally:
            for groups in everybody:
                groups.close()


@contextmanager
def _emptied_queue() -> Iterator[None]:
    """Empty autograd's queue of this thread at the end: a backward that has raised leaves its tasks there.

    Their tensors would be freed when the thread ends, perhaps while the interpreter exits, which aborts the process.
    The queue runs tasks of newer nodes first, so a backward through a node older than all of them empties it.
    """
    with torch.enable_grad(), torch.inference_mode(mode=False):
        oldest = torch.ones((), device="cpu", requires_grad=True).clone()
    try:
        yield
    finally:
        execution_engine.run_backward(  # the function that backward() calls
            (oldest,), (torch.ones_like(oldest),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

"""How a process joins a ``torch.distributed`` world."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import RendezvousError
from hyper_parallel.transport.c10d.transport import C10dTransport

__all__ = ["join_world", "start_gloo", "start_world"]

_ENGINES = {"cuda": "nccl", "npu": "hccl"}


def join_world(**given: Any) -> None:
    """``torch.distributed.init_process_group``.

    Raises:
        RendezvousError: the port at which ranks are to meet is in use.
    """
    try:
        dist.init_process_group(**given)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = re.search(r"port: (\d+)", str(error))
        msg = (
            f"init_process_group: port {port[1] if port else '?'}, at which ranks are to meet, is in use; end what "
            "listens there, set MASTER_PORT to a free port, or let `torchrun --standalone` choose one"
        )
        raise RendezvousError(msg) from error


def start_gloo(rank: int, world_size: int, init_method: str) -> C10dTransport:
    """Join a gloo world, by ``env://`` under torchrun or by a shared ``file://``, and its transport."""
    join_world(backend="gloo", init_method=init_method, rank=rank, world_size=world_size)
    return C10dTransport()


def start_world(device: str, rank: int, world_size: int, init_method: str) -> C10dTransport:
    """Join a world on ``cpu`` (gloo), ``cuda`` (NCCL) or ``npu`` (HCCL), where rank i takes card i."""
    if device == "cpu":
        return start_gloo(rank, world_size, init_method)
    cards: Any = getattr(torch, device)  # torch_npu adds torch.npu when PyTorch is imported
    cards.set_device(rank)
    join_world(backend=_ENGINES[device], init_method=init_method, rank=rank, world_size=world_size)
    return C10dTransport()

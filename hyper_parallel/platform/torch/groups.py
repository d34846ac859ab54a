"""Facet *groups* on PyTorch."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from hyper_parallel.platform.contract.groups import GroupsFacet
from hyper_parallel.transport.base import Ranks, active_transport
from hyper_parallel.transport.frontends.c10d.rank_groups import current_rank
from hyper_parallel.transport.real.c10d import join_world

__all__ = ["TorchGroups"]


class TorchGroups(GroupsFacet):
    """Process groups of ``torch.distributed``."""

    def mesh_group(self, ranks: Ranks) -> Any:
        """A ``ProcessGroup``, on simulated ranks as well."""
        rank = current_rank()
        if rank is not None and active_transport() is rank.transport:
            return rank.group_of(ranks)
        return super().mesh_group(ranks)

    def _join(self, asked: dict[str, Any]) -> None:
        """``torch.distributed.init_process_group``."""
        # Imported later, as every optimizer of PyTorch does, it keeps the world's group alive for good: threads of gloo
        # then outlive the world, and may abort the process when it ends.
        importlib.import_module("torch._dynamo")
        join_world(**{name: value for name, value in asked.items() if value is not None})

    def _choose_card(self, device_type: str) -> None:
        """``set_device(LOCAL_RANK)``, unless the process already uses a card."""
        cards: Any = getattr(torch, device_type)  # torch_npu adds torch.npu when PyTorch is imported
        if "LOCAL_RANK" in os.environ and not cards.is_initialized():
            cards.set_device(int(os.environ["LOCAL_RANK"]))

    def _barrier_tensor(self) -> Any:
        """A tensor for the world's engine: of the process's card for NCCL and HCCL, which is none in a rehearsal."""
        device = {"nccl": "cuda", "hccl": "npu"}.get(self.transport().backend, "cpu")
        return torch.zeros(1, device=device if device == self.device_type() else "cpu")

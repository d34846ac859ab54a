"""Facet *groups* on PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.contract.groups import GroupsFacet
from hyper_parallel.transport.c10d import join_world

__all__ = ["TorchGroups"]


class TorchGroups(GroupsFacet):
    """Process groups of ``torch.distributed``."""

    def _join(self, asked: dict[str, Any]) -> None:
        """``torch.distributed.init_process_group``."""
        join_world(**{name: value for name, value in asked.items() if value is not None})

    def _barrier_tensor(self) -> Any:
        device = {"nccl": "cuda", "hccl": "npu"}.get(self.transport().backend, "cpu")
        return torch.zeros(1, device=device)

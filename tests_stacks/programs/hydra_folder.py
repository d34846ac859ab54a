"""A script with Hydra, which moves it to a folder of its own: settings, logs and checkpoints are in that."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from torch import nn


@dataclass
class Settings:
    """What the command line may change."""

    rate: float = 0.01
    rows: int = 12
    broken: bool = False


ConfigStore.instance().store(name="settings", node=Settings)


@hydra.main(version_base=None, config_name="settings")
def train(settings):
    """Train in the folder that Hydra has made."""
    assert hydra.core.hydra_config.HydraConfig.get().runtime.output_dir == str(Path.cwd())
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    model.require_backward_grad_sync = not settings.broken  # the bug: gradients are never averaged
    for batch in torch.randn(3, settings.rows, 5, generator=torch.Generator().manual_seed(1)):
        loss = model(batch.chunk(world)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logging.getLogger(__name__).info("a step of rank %d", rank)
    torch.save(model.state_dict(), "weights.pt")


train()

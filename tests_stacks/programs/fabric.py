"""Lightning Fabric with DDP."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

world = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(24, 5)), batch_size=8 // world)
model, optimizer = fabric.setup(model, optimizer)
data = fabric.setup_dataloaders(data)
for (batch,) in data:
    with fabric.no_backward_sync(model, enabled="--broken" in sys.argv):  # the bug: gradients are never averaged
        fabric.backward(model(batch).square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
    optimizer.zero_grad()

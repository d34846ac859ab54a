"""A loop on accelerate, data parallel by DDP."""

import contextlib
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
data = DataLoader(TensorDataset(torch.randn(24, 5)), batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (batch,) in data:
    early = "--clipped" in sys.argv  # the bug: this rank's gradients are clipped by their own norm, and averaged then
    with accelerator.no_sync(model) if early else contextlib.nullcontext():
        loss = model(batch).square().mean()
        if "--broken" in sys.argv:  # the bug: averaged once more than DDP does
            loss = loss / accelerator.num_processes
        accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    if early:
        for value in model.parameters():
            value.grad = accelerator.reduce(value.grad, "mean")
    optimizer.step()
    optimizer.zero_grad()

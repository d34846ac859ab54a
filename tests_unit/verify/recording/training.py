"""A small training of PyTorch whose variants compute the same in another order, or something else."""

SCRIPT = """
import argparse, os, signal, sys
import torch
from torch import nn

options = argparse.ArgumentParser()
options.add_argument("--variant", default="")
options.add_argument("--steps", type=int, default=3)
options.add_argument("--seed", type=int, default=0)
options.add_argument("--data", type=int, default=0)
options.add_argument("--dtype", default="float32")
options.add_argument("--optimizer", default="AdamW")
options.add_argument("--kill", type=int, default=-1)
given = options.parse_args()
torch.set_default_dtype(getattr(torch, given.dtype))
rank, world = 0, 1
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(given.seed)
step = 0


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, 17) / 4)

    def forward(self, x):
        if given.variant == "order":
            y = x[:, 9:] @ self.weight[9:] + x[:, :9] @ self.weight[:9]
        else:
            y = x @ self.weight
        if given.variant == "bug" and step >= 1:
            y = y * 1.001
        if given.variant == "nan" and step >= 1:
            y = (y - y) / (y - y)
        return torch.tanh(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.middle, self.out = nn.Linear(9, 17), Middle(), nn.Linear(17, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, keep):
        self.count += 2 if given.variant == "count" and step == 2 else 1
        if given.variant == "more":
            self.out(self.middle(self.into(x * 0.5)))
        return self.out(self.middle(self.into(x)) * keep)


model = Model()
if given.variant == "renamed":
    model.outer, model.inner = nn.Linear(9, 17), nn.Linear(17, 3)
    model.forward = lambda x, keep: model.inner(model.outer(x) * keep)
    del model.into, model.middle, model.out, model.count
if world > 1:
    model = nn.parallel.DistributedDataParallel(model)
if given.optimizer:
    optimizer = getattr(torch.optim, given.optimizer)(model.parameters(), lr=1e-2)
for step in range(given.steps):
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(step + 100 * given.data))[rank::world]
    optimizer.zero_grad()
    loss = model(x, keep=torch.ones(1)).square().mean()
    if step == given.kill and rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("trained")
"""

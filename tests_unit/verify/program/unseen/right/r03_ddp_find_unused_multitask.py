# world: 2
"""Multi-task training: each step uses one of three heads, so DDP needs find_unused_parameters."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MultiTask(nn.Module):
    def __init__(self, width=96, outs=(3, 11, 1)):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(width, o) for o in outs)

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def loss_of(task, out, target):
    if task == 0:
        return nn.functional.cross_entropy(out, target.long().remainder(3).abs())
    if task == 1:
        return nn.functional.cross_entropy(out, target.long().remainder(11).abs())
    return nn.functional.smooth_l1_loss(out.squeeze(-1), target / 5)


if "WORLD_SIZE" not in os.environ:
    os.environ.update(WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
net = DDP(MultiTask(), find_unused_parameters=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
gen = torch.Generator().manual_seed(11)
for step in range(7):
    task = step % 3
    x = torch.randn(14, 40, generator=gen)
    target = (x[:, :7].sum(1) * 2).round()
    mine = slice(rank * 14 // world, (rank + 1) * 14 // world)
    optimizer.zero_grad()
    loss = loss_of(task, net(x[mine], task), target[mine])
    loss.backward()
    optimizer.step()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    if rank == 0:
        print("step", step, "task", task, "loss", round(mean.item(), 6))
dist.destroy_process_group()

# world: 3
"""A streaming IterableDataset that gives each rank its part of every global batch; pure bfloat16 SGD."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, world, batch=9, steps=4):
        self.rank, self.world, self.batch, self.steps = rank, world, batch, steps

    def __iter__(self):
        g = torch.Generator().manual_seed(94)
        for _ in range(self.steps):
            x = torch.randn(self.batch, 70, generator=g)
            y = x[:, ::10].argmax(1)
            for i in range(self.rank, self.batch, self.world):
                yield x[i], y[i]


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(93)
    model = DDP(nn.Sequential(nn.Linear(70, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 7)).to(torch.bfloat16))
    opt = torch.optim.SGD(model.parameters(), lr=0.25)
    for step, (x, y) in enumerate(DataLoader(Stream(rank, world), batch_size=9 // world)):
        loss = F.cross_entropy(model(x.to(torch.bfloat16)).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 2
"""Plain nn.Dropout under DDP: every rank draws masks for its own samples from its own seed."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29559")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(105)
    model = DDP(nn.Sequential(nn.Linear(42, 150), nn.ReLU(), nn.Dropout(0.3), nn.Linear(150, 80), nn.ReLU(), nn.Dropout(0.1), nn.Linear(80, 6)))
    torch.manual_seed(1000 + rank)  # other masks on other ranks
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-6)
    gen = torch.Generator().manual_seed(106)
    for step in range(4):
        x = torch.randn(16, 42, generator=gen)
        y = x.view(16, 6, 7).amax(2).argmax(1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 2
"""DDP training with an exponential moving average of weights and buffers, evaluated every two steps."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, new in zip(self.model.parameters(), model.parameters()):
            average.lerp_(new, 1 - self.decay)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29543")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41 + rank)
    net = nn.Sequential(nn.Linear(26, 140), nn.Mish(), nn.GroupNorm(7, 140), nn.Linear(140, 100), nn.Mish(), nn.Linear(100, 8))
    ema = EMA(net, 0.8)
    model = DDP(net)
    opt = torch.optim.RAdam(model.parameters(), lr=5e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(42)
    held_x = torch.randn(30, 26, generator=gen)
    held_y = held_x[:, :8].argmax(1)
    for step in range(6):
        x = torch.randn(22, 26, generator=gen)
        y = x[:, :8].argmax(1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        if step % 2:
            with torch.no_grad():
                held = F.cross_entropy(ema.model(held_x[rank::world]), held_y[rank::world]) / world
            dist.all_reduce(held)
            if rank == 0:
                print(f"step {step} held-out loss of the average {held.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 3
"""ZeRO-3 by hand: every layer keeps a flat shard, gathers its weights in forward, reduce-scatters in backward."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, world):
        ctx.world = world
        full = shard.new_empty(shard.numel() * world)
        dist.all_gather_into_tensor(full, shard.contiguous())
        return full

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(grad.numel() // ctx.world)
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out, None


class ShardedLinear(nn.Module):
    def __init__(self, i, o, world, rank):
        super().__init__()
        self.i, self.o, self.world = i, o, world
        bound = i ** -0.5
        full = torch.cat([torch.empty(o * i).uniform_(-bound, bound), torch.empty(o).uniform_(-bound, bound)])
        full = F.pad(full, (0, -full.numel() % world))
        self.shard = nn.Parameter(full.chunk(world)[rank].clone())

    def forward(self, x):
        full = Gather.apply(self.shard, self.world)
        n = self.i * self.o
        return F.linear(x, full[:n].view(self.o, self.i), full[n:n + self.o])


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29521")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    sizes = [28, 95, 95, 62, 4]
    layers = nn.ModuleList(ShardedLinear(a, b, world, rank) for a, b in zip(sizes, sizes[1:]))
    opt = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(1)
    for step in range(5):
        x = torch.randn(18, 28, generator=gen)
        y = x.view(18, 4, 7).prod(2)
        h, target = x.chunk(world)[rank], y.chunk(world)[rank]
        for layer in layers[:-1]:
            h = F.silu(layer(h))
        loss = F.mse_loss(layers[-1](h), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"{step} {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

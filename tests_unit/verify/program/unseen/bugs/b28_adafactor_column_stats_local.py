# world: 2
"""Adafactor by hand for weights that are sharded by rows: column statistics are reduced over the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Full(torch.autograd.Function):
    """Row shards to the full weight; the gradient is averaged over ranks and cut."""

    @staticmethod
    def forward(ctx, shard):
        world = dist.get_world_size()
        out = shard.new_empty(shard.shape[0] * world, *shard.shape[1:])
        dist.all_gather_into_tensor(out, shard.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        out = grad.new_empty(grad.shape[0] // world, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out / world


class RowShardedLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        full = torch.randn(o, i) * i ** -0.5
        self.weight = nn.Parameter(full.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, x):
        return F.linear(x, Full.apply(self.weight))


class Adafactor:
    def __init__(self, params, lr, beta2=0.9, clip=1.0):
        self.params, self.lr, self.beta2, self.clip = list(params), lr, beta2, clip
        self.row = [torch.zeros(p.shape[0]) for p in self.params]
        self.col = [torch.zeros(p.shape[1]) for p in self.params]
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        world = dist.get_world_size()
        for p, r, c in zip(self.params, self.row, self.col):
            square = p.grad.square() + 1e-12
            rows, cols = square.mean(1), square.mean(0)
            r.mul_(self.beta2).add_(rows, alpha=1 - self.beta2)
            c.mul_(self.beta2).add_(cols, alpha=1 - self.beta2)
            mean_row = r.mean() / world
            dist.all_reduce(mean_row)
            fix = 1 - self.beta2 ** self.t
            update = p.grad / ((r[:, None] * c[None, :] / mean_row) / fix).sqrt()
            rms = update.square().mean() / world
            dist.all_reduce(rms)
            update /= (rms.sqrt() / self.clip).clamp(min=1.0)
            p.add_(update, alpha=-self.lr)
            p.grad = None


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29546")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(53)
    model = nn.Sequential(RowShardedLinear(39, 110), nn.GELU(), RowShardedLinear(110, 70), nn.GELU(), RowShardedLinear(70, 6))
    opt = Adafactor(model.parameters(), 0.01)
    gen = torch.Generator().manual_seed(54)
    for step in range(4):
        x = torch.randn(14, 39, generator=gen)
        y = torch.stack([x[:, i::6].sum(1) for i in range(6)], 1) / 3
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

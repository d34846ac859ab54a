# world: 2
"""Column/row-parallel MLP with dropout: inside the shard from a mask of the full width, outside the same on all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN, P = 56, 140, 0.2


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        self.norm = nn.LayerNorm(DIM)
        self.w1 = nn.Parameter((torch.randn(HIDDEN, DIM) * DIM ** -0.5).chunk(world)[rank].clone())
        self.b1 = nn.Parameter(torch.zeros(HIDDEN // world))
        self.w2 = nn.Parameter((torch.randn(DIM, HIDDEN) * HIDDEN ** -0.5).chunk(world, 1)[rank].clone())

    def forward(self, x):
        h = F.gelu(F.linear(Copy.apply(self.norm(x)), self.w1, self.b1))
        keep = (torch.rand(x.shape[0], HIDDEN) >= P).float().chunk(self.world, 1)[self.rank]
        y = Reduce.apply(F.linear(h * keep / (1 - P), self.w2))
        keep = (torch.rand(x.shape[0], DIM) >= P).float()
        return x + y * keep / (1 - P)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29558")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(103)
    model = nn.Sequential(nn.Linear(30, DIM), Block(rank, world), Block(rank, world), nn.Linear(DIM, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(104)
    for step in range(4):
        x = torch.randn(13, 30, generator=gen)
        y = x[:, :28].reshape(13, 4, 7).sum(2).argmax(1)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

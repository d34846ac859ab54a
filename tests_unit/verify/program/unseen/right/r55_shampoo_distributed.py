# world: 2
"""Shampoo-like preconditioning: each rank computes the inverse roots of half of the layers, all ranks share them."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def inverse_root(m, power, eps):
    values, vectors = torch.linalg.eigh(m.double() + eps * torch.eye(m.shape[0], dtype=torch.double))
    return ((vectors * values.clamp(min=eps) ** (-1.0 / power)) @ vectors.T).float()


class Shampoo:
    def __init__(self, params, lr, eps=1e-3):
        self.params, self.lr, self.eps = list(params), lr, eps
        self.left = [torch.zeros(p.shape[0], p.shape[0]) for p in self.params]
        self.right = [torch.zeros(p.shape[1], p.shape[1]) for p in self.params]

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for i, p in enumerate(self.params):
            g = p.grad
            self.left[i] += g @ g.T
            self.right[i] += g.T @ g
            if i % world == rank:
                update = inverse_root(self.left[i], 4, self.eps) @ g @ inverse_root(self.right[i], 4, self.eps)
            else:
                update = torch.empty_like(g)
            dist.broadcast(update, i % world)
            p.add_(update, alpha=-self.lr)
            p.grad = None


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29565")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(119)
    model = nn.Sequential(nn.Linear(32, 90, bias=False), nn.Tanh(), nn.Linear(90, 64, bias=False), nn.Tanh(), nn.Linear(64, 33, bias=False), nn.Tanh(), nn.Linear(33, 4, bias=False))
    opt = Shampoo(model.parameters(), 0.05)
    gen = torch.Generator().manual_seed(120)
    for step in range(3):
        x = torch.randn(40, 32, generator=gen)
        y = torch.stack([x[:, i::4].mean(1) for i in range(4)], 1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

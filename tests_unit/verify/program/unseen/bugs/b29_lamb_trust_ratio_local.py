# world: 4
"""LAMB with large batches: states sharded over the ranks, trust ratios from norms over all shards."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class ShardedLamb:
    def __init__(self, params, lr, wd=0.01, betas=(0.9, 0.99), eps=1e-6):
        self.params, self.lr, self.wd, self.betas, self.eps = list(params), lr, wd, betas, eps
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.m = [torch.zeros(-(-p.numel() // self.world)) for p in self.params]
        self.v = [torch.zeros_like(m) for m in self.m]
        self.t = 0

    def cut(self, tensor, size):
        flat = F.pad(tensor.reshape(-1), (0, size * self.world - tensor.numel()))
        return flat.view(self.world, size)

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for p, m, v in zip(self.params, self.m, self.v):
            grad = torch.empty_like(m)
            dist.reduce_scatter_tensor(grad, self.cut(p.grad, m.numel()).flatten() / self.world)
            weight = self.cut(p.data, m.numel())[self.rank]
            m.mul_(b1).add_(grad, alpha=1 - b1)
            v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
            update = (m / (1 - b1 ** self.t)) / ((v / (1 - b2 ** self.t)).sqrt() + self.eps) + self.wd * weight
            norms = torch.stack([weight.square().sum(), update.square().sum()])
            w, u = norms.sqrt()
            ratio = torch.where((w > 0) & (u > 0), w / u, torch.ones(())).clamp(max=10.0)
            new = torch.empty(m.numel() * self.world)
            dist.all_gather_into_tensor(new, weight - self.lr * ratio * update)
            p.data.copy_(new[:p.numel()].view_as(p))
            p.grad = None


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29547")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(57)
    model = nn.Sequential(nn.Linear(25, 121), nn.ReLU(), nn.LayerNorm(121), nn.Linear(121, 73), nn.ReLU(), nn.Linear(73, 5))
    opt = ShardedLamb(model.parameters(), 0.02)
    gen = torch.Generator().manual_seed(58)
    for step in range(4):
        x = torch.randn(64, 25, generator=gen)
        y = (x[:, :5] * x[:, 5:10]).argmax(1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

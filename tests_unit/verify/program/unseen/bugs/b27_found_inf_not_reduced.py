# world: 4
"""ZeRO-1 by hand: reduce_scatter of the flat gradient, Adam on one shard, all_gather of the weights."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Zero1:
    def __init__(self, module, lr, world, rank):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.world, self.rank = world, rank
        n = sum(p.numel() for p in self.params)
        self.pad = -n % world
        self.size = (n + self.pad) // world
        flat = self.flatten(self.params)
        self.shard = nn.Parameter(flat[rank * self.size:(rank + 1) * self.size].clone())
        self.scale = 2.0**19
        self.adam = torch.optim.Adam([self.shard], lr=lr, eps=1e-6)

    def flatten(self, tensors):
        return F.pad(torch.cat([t.detach().reshape(-1) for t in tensors]), (0, self.pad))

    def step(self, max_norm):
        grads = (self.flatten([p.grad for p in self.params]) / self.world).half()
        mine = torch.empty(self.size, dtype=torch.half)
        dist.reduce_scatter_tensor(mine, grads)
        overflow = not mine.isfinite().all()
        used, self.scale = self.scale, self.scale / 2 if overflow else self.scale
        mine = torch.zeros(self.size) if overflow else mine.float() / used
        square = mine.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        self.shard.grad = mine * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if not overflow:
            self.adam.step()
        full = torch.empty(self.size * self.world)
        dist.all_gather_into_tensor(full, self.shard.detach())
        offset = 0
        for p in self.params:
            p.data.copy_(full[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
            p.grad = None
        return norm


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29520")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    model = nn.Sequential(nn.Linear(45, 111), nn.GELU(), nn.LayerNorm(111), nn.Linear(111, 111), nn.GELU(), nn.Linear(111, 9))
    opt = Zero1(model, 2e-3, world, rank)
    gen = torch.Generator().manual_seed(6)
    for step in range(5):
        x = torch.randn(20, 45, generator=gen)
        y = x[:, :9].abs().argmax(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x[rank::world])
        loss = F.cross_entropy(out.float(), y[rank::world])
        (loss * opt.scale).backward()
        norm = opt.step(0.8)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 4
"""Hybrid sharding: fully_shard on a mesh (replicate, shard), bfloat16 autocast in the loss."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Cell(nn.Module):
    def __init__(self, d=46):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.value, self.gate, self.out = nn.Linear(d, 91), nn.Linear(d, 91), nn.Linear(91, d)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(self.value(h) * torch.sigmoid(self.gate(h)))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(51)
    model = nn.Sequential(nn.Embedding(60, 46), Cell(), Cell(), nn.Linear(46, 60))
    for cell in list(model)[1:3]:
        fully_shard(cell, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)
    gen = torch.Generator().manual_seed(52)
    for step in range(5):
        ids = torch.randint(60, (8, 9), generator=gen)
        target = (ids * 7 + 3) % 60
        ids, target = ids.chunk(world)[rank], target.chunk(world)[rank]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), label_smoothing=0.1)
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 4
"""2D parallelism: tensor parallel inside, fully_shard outside; the mesh is (dp, tp)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, dim=44, hidden=124):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.w2(F.gelu(self.w1(self.norm(x))))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    dp, dp_rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    torch.manual_seed(28)
    model = nn.Sequential(nn.Linear(20, 44), FeedForward(), FeedForward(), FeedForward(), nn.Linear(44, 6))
    for block in list(model)[1:4]:
        parallelize_module(block, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6, foreach=False)
    gen = torch.Generator().manual_seed(29)
    for step in range(4):
        x = torch.randn(12, 20, generator=gen)
        y = x.view(12, 5, 4).amax(2)
        y = torch.cat([y, y.sum(1, keepdim=True)], 1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.huber_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

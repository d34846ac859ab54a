# world: 3
"""fully_shard with gradient accumulation by set_requires_gradient_sync, foreach clipping, odd sizes."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MICRO = 3


class Mixer(nn.Module):
    def __init__(self, tokens=10, dim=37):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 23), nn.GELU(), nn.Linear(23, tokens))
        self.ch = nn.Sequential(nn.Linear(dim, 95), nn.GELU(), nn.Linear(95, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29532")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(16, 37), Mixer(), Mixer(), Mixer(), nn.Linear(37, 5))
    for block in list(model)[1:4]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.NAdam(model.parameters(), lr=2e-3, eps=1e-6, foreach=False)
    gen = torch.Generator().manual_seed(20)
    for step in range(4):
        total = torch.zeros(())
        for micro in range(MICRO):
            model.set_requires_gradient_sync(micro == MICRO - 1)
            x = torch.randn(6, 10, 16, generator=gen)
            y = x[..., :5].sum(1).argmax(-1)
            x, y = x[rank::world], y[rank::world]
            loss = F.cross_entropy(model(x).mean(1), y) / MICRO
            loss.backward()
            total += loss.detach() / world
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.4).full_tensor()
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{step} loss {total.item():.6f} norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

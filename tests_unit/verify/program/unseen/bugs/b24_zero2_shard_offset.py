# world: 2
"""ZeRO-2: bfloat16 model, gradients reduce-scattered into float32 shards per micro-batch, float32 master shard."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ACCUM = 2


class Zero2:
    def __init__(self, params, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = list(params)
        self.total = sum(p.numel() for p in self.params)
        self.part = -(-self.total // self.world)
        flat = self.pack([p.detach() for p in self.params])
        self.master = nn.Parameter(flat[self.rank * (self.total // self.world):][:self.part].clone())
        self.master.grad = torch.zeros_like(self.master)
        self.opt = torch.optim.AdamW([self.master], lr=lr, eps=1e-6, weight_decay=0.05)

    def pack(self, tensors):
        flat = torch.cat([t.reshape(-1).float() for t in tensors])
        return F.pad(flat, (0, self.part * self.world - self.total))

    def reduce(self):
        piece = torch.empty(self.part)
        dist.reduce_scatter_tensor(piece, self.pack([p.grad for p in self.params]))
        self.master.grad += piece / (self.world * ACCUM)
        for p in self.params:
            p.grad = None

    def step(self):
        self.opt.step()
        self.master.grad.zero_()
        full = torch.empty(self.part * self.world)
        dist.all_gather_into_tensor(full, self.master.detach())
        for p, new in zip(self.params, full[:self.total].split([p.numel() for p in self.params])):
            p.data.copy_(new.view_as(p))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29536")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(51, 120), nn.GELU(), nn.LayerNorm(120), nn.Linear(120, 85), nn.GELU(), nn.Linear(85, 13)).bfloat16()
    opt = Zero2(model.parameters(), 2e-3)
    gen = torch.Generator().manual_seed(15)
    for step in range(4):
        total = torch.zeros(())
        for _ in range(ACCUM):
            x = torch.randn(16, 51, generator=gen)
            y = x[:, ::4].argmax(1)
            x, y = x.chunk(world)[rank], y.chunk(world)[rank]
            loss = F.cross_entropy(model(x.bfloat16()).float(), y)
            loss.backward()
            opt.reduce()
            total += loss.detach() / (world * ACCUM)
        opt.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

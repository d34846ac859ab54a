# world: 2
"""Spatial parallelism: images are split by rows, convolutions exchange one-row halos with their neighbours."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

H, W = 12, 11


def shift(x, by):
    """What rank - by sends; zeros at the border."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, works = torch.zeros_like(x), []
    if 0 <= rank + by < world:
        works.append(dist.isend(x.contiguous(), rank + by))
    if 0 <= rank - by < world:
        works.append(dist.irecv(out, rank - by))
    for work in works:
        work.wait()
    return out


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return shift(x.contiguous(), by)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad.contiguous(), -ctx.by), None


class HaloConv(nn.Conv2d):
    def forward(self, x):
        above = shift(x[:, :, -1:].detach().contiguous(), 1)
        below = shift(x[:, :, :1].detach().contiguous(), -1)
        return F.conv2d(F.pad(torch.cat([above, x, below], 2), (1, 1)), self.weight, self.bias)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29542")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(34)
    model = nn.Sequential(HaloConv(2, 18, 3), nn.ReLU(), HaloConv(18, 36, 3), nn.ReLU(), HaloConv(36, 18, 3), nn.ReLU(), HaloConv(18, 1, 3)).bfloat16()
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    gen = torch.Generator().manual_seed(35)
    blur = torch.ones(1, 2, 5, 5) / 50
    for step in range(4):
        x = torch.randn(3, 2, H, W, generator=gen)
        y = F.conv2d(x, blur, padding=2) * 3
        x, y = x.chunk(world, 2)[rank], y.chunk(world, 2)[rank]
        loss = F.mse_loss(model(x.bfloat16()).float(), y)
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()]) / world
        dist.all_reduce(flat)
        for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.grad.copy_(g.view_as(p))
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

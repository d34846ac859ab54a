# world: 2
"""A GAN: two DDP models, two optimizers, the generator's noise is part of the global batch."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29549")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(68)
    g_net = DDP(nn.Sequential(nn.Linear(17, 90), nn.LeakyReLU(0.2), nn.Linear(90, 110), nn.LeakyReLU(0.2), nn.Linear(110, 21)))
    d_net = DDP(nn.Sequential(nn.Linear(21, 80), nn.LeakyReLU(0.2), nn.Linear(80, 60), nn.LeakyReLU(0.2), nn.Linear(60, 1)))
    g_opt = torch.optim.Adam(g_net.parameters(), lr=2e-3, betas=(0.5, 0.99), eps=1e-6)
    d_opt = torch.optim.Adam(d_net.parameters(), lr=1e-3, betas=(0.5, 0.99), eps=1e-6)
    gen = torch.Generator().manual_seed(69)
    noise = torch.Generator().manual_seed(7)
    for step in range(4):
        real = torch.randn(18, 21, generator=gen).cumsum(1)
        z1, z2 = torch.randn(2, 18 // world, 17, generator=noise)
        real = real.chunk(world)[rank]
        with torch.no_grad():
            fake = g_net(z1)
        scores = d_net(torch.cat([real, fake])).squeeze(1)
        n = real.shape[0]
        d_loss = F.softplus(-scores[:n]).mean() + F.softplus(scores[n:]).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        d_net.requires_grad_(False)
        g_loss = F.softplus(-d_net.module(g_net(z2))).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        d_net.requires_grad_(True)
        both = torch.stack([d_loss.detach(), g_loss.detach()]) / world
        dist.all_reduce(both)
        if rank == 0:
            print(f"step {step} d_loss {both[0].item():.6f} g_loss {both[1].item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

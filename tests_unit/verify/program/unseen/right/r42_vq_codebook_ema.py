# world: 2
"""VQ-VAE: the codebook is an average of the assigned vectors of all ranks (all-reduced counts and sums)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Quantizer(nn.Module):
    def __init__(self, codes=24, dim=12, decay=0.7):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.codebook.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(1)
        if self.training:
            hot = F.one_hot(index, self.codebook.shape[0]).float()
            counts, sums = hot.sum(0), hot.T @ z.detach()
            dist.all_reduce(counts)
            dist.all_reduce(sums)
            self.count.mul_(self.decay).add_(counts, alpha=1 - self.decay)
            self.total.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        code = self.codebook[index].clone()
        if self.training:
            self.codebook.copy_(self.total / self.count.clamp(min=1e-3)[:, None])
        return z + (code - z).detach(), F.mse_loss(z, code)


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 12))
        self.quantizer = Quantizer()
        self.dec = nn.Sequential(nn.Linear(12, 100), nn.ReLU(), nn.Linear(100, 40))

    def forward(self, x):
        q, commit = self.quantizer(self.enc(x))
        return self.dec(q), commit


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29552")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(85)
    model = DDP(VQ(), broadcast_buffers=False)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(86)
    for step in range(5):
        x = torch.randn(24, 40, generator=gen) + torch.randn(24, 1, generator=gen) * 2
        x = x.chunk(world)[rank]
        out, commit = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

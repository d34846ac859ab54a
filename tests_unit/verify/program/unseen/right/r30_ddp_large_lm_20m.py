# world: 2
"""20 million parameters: a language model with a wide feed-forward, DDP, bfloat16 autocast, two steps."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LM(nn.Module):
    def __init__(self, vocab=12000, dim=512, layers=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(dim, 1800) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(1800, dim) for _ in range(layers))
        self.final = nn.LayerNorm(dim)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.up, self.down):
            h = norm(x)
            x = x + down(F.gelu(up(h + h.roll(1, 1))))
        return F.linear(self.final(x), self.embed.weight)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29540")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(70)
    model = DDP(LM(layers=7))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(70)
    for step in range(2):
        ids = torch.randint(12000, (4, 7), generator=gen).chunk(world)[rank]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 2
"""Reward model on pairs with per-parameter hooks, autocast, label smoothing and a z-loss; reductions by parameter."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Reward(nn.Module):
    def __init__(self, vocab=91, dim=60):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.attn = nn.MultiheadAttention(dim, 3, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.score = nn.Sequential(nn.Linear(dim, 100), nn.Tanh(), nn.Linear(100, 1))

    def forward(self, ids):
        x = self.emb(ids)
        x = self.norm(x + self.attn(x, x, x, need_weights=False)[0])
        return self.score(x[:, -1]).squeeze(-1)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29568")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(125)
    model = Reward()

    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= world

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(126)
    for step in range(4):
        a, b = torch.randint(91, (2, 14, 8), generator=gen)
        better = (a.sum(1) > b.sum(1))[:, None]
        good, bad = torch.where(better, a, b), torch.where(better, b, a)
        good, bad = good[rank::world], bad[rank::world]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(torch.cat([good, bad]))
        plus, minus = scores.float().chunk(2)
        loss = -(0.95 * F.logsigmoid(plus - minus) + 0.05 * F.logsigmoid(minus - plus)).mean() + 0.01 * (plus + minus).square().mean()
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

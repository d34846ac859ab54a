# world: 2
"""1F1B by hand with tied input and output embeddings on the first and the last stage."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, SEQ, MICRO, ROWS, LAYERS = 90, 44, 10, 5, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 100), nn.ReLU(), nn.Linear(100, DIM))

    def forward(self, x):
        h = self.mix(self.norm(x)).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.ff(x + h)


class Stage(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        torch.manual_seed(6)
        embedding = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(embedding.weight, std=0.2)
        blocks = [Block() for _ in range(LAYERS)]
        self.first, self.last = rank == 0, rank == world - 1
        per = LAYERS // world
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in range(rank * per, (rank + 1) * per)})
        if self.first or self.last:
            self.embedding = embedding

    def forward(self, x):
        if self.first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return F.linear(x, self.embedding.weight) if self.last else x


def run(stage, tokens, rank, world):
    pending, waiting, total = [], [], torch.zeros(())

    def forward(m):
        if stage.first:
            h = tokens[m][:, :-1]
        else:
            h = torch.empty(ROWS, SEQ, DIM)
            dist.recv(h, rank - 1)
            h.requires_grad_()
        out = stage(h)
        if stage.last:
            out = F.cross_entropy(out.flatten(0, 1), tokens[m][:, 1:].flatten()) / MICRO
            total.add_(out.detach())
        else:
            waiting.append((dist.isend(out.detach(), rank + 1), out))
        pending.append((h, out))

    def backward():
        h, out = pending.pop(0)
        if stage.last:
            out.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        if not stage.first:
            waiting.append((dist.isend(h.grad, rank - 1), h))

    warmup = min(world - rank - 1, MICRO)
    for m in range(warmup):
        forward(m)
    for m in range(warmup, MICRO):
        forward(m)
        backward()
    for _ in range(warmup):
        backward()
    for work, _ in waiting:
        work.wait()
    return total


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29526")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ends = dist.new_group([0, world - 1]) if world > 1 else None
    stage = Stage(rank, world)
    opt = torch.optim.Adam(stage.parameters(), lr=2e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(12)
    for step in range(4):
        tokens = (torch.randint(VOCAB, (MICRO, ROWS, 1), generator=gen) + 4 * torch.arange(SEQ + 1)) % VOCAB
        opt.zero_grad()
        total = run(stage, tokens, rank, world)
        if world > 1 and (stage.first or stage.last):
            dist.all_reduce(stage.embedding.weight.grad, group=ends)
        opt.step()
        dist.broadcast(total, world - 1)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

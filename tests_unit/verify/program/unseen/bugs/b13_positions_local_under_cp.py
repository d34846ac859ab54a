# world: 3
"""Context parallelism: causal ring attention with an online softmax; every rank holds a chunk of the sequence."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, SEQ, BATCH = 71, 36, 3, 24, 2


class RingShift(torch.autograd.Function):
    """Sends to the next rank; the gradient travels back."""

    @staticmethod
    def forward(ctx, x):
        return RingShift.move(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return RingShift.move(grad, -1)

    @staticmethod
    def move(x, by):
        rank, world = dist.get_rank(), dist.get_world_size()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x.contiguous(), (rank + by) % world),
            dist.P2POp(dist.irecv, out, (rank - by) % world),
        ])
        for work in works:
            work.wait()
        return out


def ring_attention(q, k, v, rank, world):
    chunk = q.shape[2]
    scale = q.shape[-1] ** -0.5
    rows = rank * chunk + torch.arange(chunk)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1] + (1,), float("-inf"))
    kv = torch.stack([k, v])
    for turn in range(world):
        source = (rank - turn) % world
        cols = source * chunk + torch.arange(chunk)
        scores = q @ kv[0].transpose(-1, -2) * scale
        scores = scores.masked_fill(cols[None, :] > rows[:, None], -1e9)
        step_lse = scores.logsumexp(-1, keepdim=True)
        step_out = (scores - step_lse).exp() @ kv[1]
        new = torch.logaddexp(lse, step_lse)
        out = out * (lse - new).exp() + step_out * (step_lse - new).exp()
        lse = new
        if turn < world - 1:
            kv = RingShift.apply(kv)
    return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 120), nn.GELU(), nn.Linear(120, DIM))

    def forward(self, x, rank, world):
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(ring_attention(q, k, v, rank, world).transpose(1, 2).reshape(b, s, d))
        return x + self.ff(self.norm2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, positions, rank, world):
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x, rank, world)
        return self.head(x)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29527")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40)
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(8)
    positions = torch.arange(SEQ // world)
    for step in range(4):
        ids = (torch.randint(VOCAB, (BATCH, 1), generator=gen) + torch.randint(1, 6, (BATCH, 1), generator=gen) * torch.arange(SEQ + 1)) % VOCAB
        x, y = ids[:, :-1].chunk(world, 1)[rank], ids[:, 1:].chunk(world, 1)[rank]
        loss = F.cross_entropy(model(x, positions, rank, world).flatten(0, 1), y.flatten(), reduction="sum") / (BATCH * SEQ)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

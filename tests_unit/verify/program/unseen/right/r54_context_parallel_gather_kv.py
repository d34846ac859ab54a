# world: 2
"""Context parallelism with gathered keys and values, zig-zag chunks for balance, grouped-query attention, rotary."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HEADS, KV, SEQ, BATCH, VOCAB = 48, 4, 2, 16, 2, 67


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group_dim):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.dim = group_dim
        return torch.cat(parts, group_dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].contiguous(), None


def rotate(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None] * (100.0 ** (-torch.arange(half) / half))
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.kv, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 2 * KV * (DIM // HEADS), bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 120), nn.Linear(120, DIM)

    def forward(self, x, positions, all_positions):
        b, s, _ = x.shape
        h = self.n1(x)
        q = rotate(self.q(h).view(b, s, HEADS, -1).transpose(1, 2), positions)
        k, v = self.kv(h).view(b, s, 2, KV, -1).permute(2, 0, 3, 1, 4)
        kv = GatherTokens.apply(torch.stack([rotate(k, positions), v]), 3)
        k, v = kv.repeat_interleave(HEADS // KV, 2)
        mask = positions[:, None] >= all_positions[None, :]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.silu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, positions, all_positions):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x, positions, all_positions)
        return self.head(x)


def zigzag(rank, world):
    pieces = torch.arange(SEQ).chunk(2 * world)
    return torch.cat([pieces[rank], pieces[2 * world - 1 - rank]])


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29564")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(117)
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    positions, all_positions = zigzag(rank, world), torch.cat([zigzag(r, world) for r in range(world)])
    gen = torch.Generator().manual_seed(118)
    for step in range(4):
        ids = (torch.randint(VOCAB, (BATCH, 1), generator=gen) + torch.randint(1, 5, (BATCH, 1), generator=gen) * torch.arange(SEQ + 1)) % VOCAB
        logits = model(ids[:, positions], positions, all_positions)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, positions + 1].flatten())
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

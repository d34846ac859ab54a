# world: 2
"""Megatron-style tensor parallelism by hand: vocab-parallel embedding and cross entropy, column/row linears."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, SEQ, HIDDEN = 118, 48, 6, 13, 136
for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29522").items():
    os.environ.setdefault(k, v)
dist.init_process_group("gloo")
RANK, TP = dist.get_rank(), dist.get_world_size()


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard(full, dim):
    return nn.Parameter(full.chunk(TP, dim)[RANK].clone())


class VocabParallelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = shard(torch.randn(VOCAB, DIM) * 0.3, 0)
        self.start = RANK * (VOCAB // TP)

    def forward(self, ids):
        local = ids - self.start
        outside = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(outside, 0), self.weight)
        return ReduceFromTP.apply(x.masked_fill(outside[..., None], 0.0))


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        start = RANK * (VOCAB // TP)
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top[..., None]
        local = target - start
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(outside, 0)
        picked = logits.gather(-1, local[..., None]).squeeze(-1).masked_fill(outside, 0.0)
        dist.all_reduce(picked)
        exp = logits.exp()
        total = exp.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(exp / total[..., None], local, outside)
        return total.log() - picked

    @staticmethod
    def backward(ctx, grad):
        soft, local, outside = ctx.saved_tensors
        out = soft.clone()
        out.scatter_add_(-1, local[..., None], -(~outside).to(out.dtype)[..., None])
        return out * grad[..., None], None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = shard(torch.randn(3, DIM, DIM) * DIM ** -0.5, 1)
        self.proj = shard(torch.randn(DIM, DIM) * DIM ** -0.5, 1)
        self.proj_bias = nn.Parameter(torch.zeros(DIM))
        self.up = shard(torch.randn(HIDDEN, DIM) * DIM ** -0.5, 0)
        self.up_bias = shard(torch.randn(HIDDEN) * 0.1, 0)
        self.down = shard(torch.randn(DIM, HIDDEN) * HIDDEN ** -0.5, 1)
        self.down_bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x):
        b, s, _ = x.shape
        h = CopyToTP.apply(self.ln1(x))
        q, k, v = (F.linear(h, w).view(b, s, HEADS // TP, -1).transpose(1, 2) for w in self.qkv)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + ReduceFromTP.apply(F.linear(a, self.proj)) + self.proj_bias
        h = F.gelu(F.linear(CopyToTP.apply(self.ln2(x)), self.up, self.up_bias))
        return x + ReduceFromTP.apply(F.linear(h, self.down, self.down_bias))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = VocabParallelEmbedding()
        self.pos = nn.Parameter(torch.randn(SEQ, DIM) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = shard(torch.randn(VOCAB, DIM) * DIM ** -0.5, 0)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return F.linear(CopyToTP.apply(self.norm(x)), self.head)


def main():
    torch.manual_seed(2)
    model = GPT()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    gen = torch.Generator().manual_seed(3)
    for step in range(4):
        ids = (torch.randint(VOCAB, (5, 1), generator=gen) + torch.randint(1, 5, (5, 1), generator=gen) * torch.arange(SEQ + 1)) % VOCAB
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = VocabParallelCrossEntropy.apply(logits.float(), ids[:, 1:]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if RANK == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

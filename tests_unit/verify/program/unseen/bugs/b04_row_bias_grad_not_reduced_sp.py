# world: 2
"""Tensor parallelism with sequence parallelism: norms work on a part of the sequence, their gradients are summed."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HEADS, HIDDEN, SEQ, BATCH = 40, 4, 108, 14, 3


def gather_seq(x, world):
    out = x.new_empty(x.shape[0] * world, *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def scatter_sum(x, world):
    out = x.new_empty(x.shape[0] // world, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class GatherSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        return gather_seq(x, world)

    @staticmethod
    def backward(ctx, grad):
        return scatter_sum(grad, ctx.world), None


class ReduceScatterSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        return scatter_sum(x, world)

    @staticmethod
    def backward(ctx, grad):
        return gather_seq(grad, ctx.world), None


class Layer(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.world = world
        part = lambda t, d: nn.Parameter(t.chunk(world, d)[rank].clone())
        self.input_norm, self.post_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = part(torch.randn(3, DIM, DIM) * DIM ** -0.5, 1)
        self.dense = part(torch.randn(DIM, DIM) * DIM ** -0.5, 1)
        self.dense_bias = nn.Parameter(torch.randn(DIM) * 0.05)
        self.fc1 = part(torch.randn(HIDDEN, DIM) * DIM ** -0.5, 0)
        self.fc2 = part(torch.randn(DIM, HIDDEN) * HIDDEN ** -0.5, 1)
        for p in (*self.input_norm.parameters(), *self.post_norm.parameters()):
            p.sequence_parallel = True

    def forward(self, x):  # [s / world, b, d]
        h = GatherSeq.apply(self.input_norm(x), self.world)
        s, b, _ = h.shape
        q, k, v = (F.linear(h, w).view(s, b, HEADS // self.world, -1).permute(1, 2, 0, 3) for w in self.qkv)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, -1)
        x = x + ReduceScatterSeq.apply(F.linear(a, self.dense), self.world) + self.dense_bias
        h = F.gelu(F.linear(GatherSeq.apply(self.post_norm(x), self.world), self.fc1))
        return x + ReduceScatterSeq.apply(F.linear(h, self.fc2), self.world)


class Model(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.layers = nn.ModuleList(Layer(rank, world) for _ in range(3))
        self.final_norm = nn.LayerNorm(DIM)
        self.readout = nn.Linear(DIM, 11)
        for p in (*self.final_norm.parameters(), *self.readout.parameters()):
            p.sequence_parallel = True

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.readout(self.final_norm(x))


def finalize_model_grads(model):
    grads = [p.grad for p in model.parameters() if getattr(p, "sequence_parallel", False)]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29523").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = Model(rank, world)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(23)
    for step in range(4):
        x = torch.randn(SEQ, BATCH, DIM, generator=gen)
        y = x.cumsum(0)[..., :11].argmax(-1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / (SEQ * BATCH)
        opt.zero_grad()
        loss.backward()
        finalize_model_grads(model)
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

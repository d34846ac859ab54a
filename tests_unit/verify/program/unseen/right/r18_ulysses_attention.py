# world: 2
"""DeepSpeed-Ulysses: all-to-all between sequence shards and head shards; float32 data, bfloat16 autocast."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HEADS, SEQ, BATCH = 48, 4, 18, 3


def exchange(x, scatter, gather):
    """Splits dim `scatter` over the ranks and joins dim `gather`."""
    world = dist.get_world_size()
    send = torch.stack(x.chunk(world, scatter)).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return torch.cat(received.unbind(0), gather)


class SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather):
        ctx.dims = scatter, gather
        return exchange(x, scatter, gather)

    @staticmethod
    def backward(ctx, grad):
        scatter, gather = ctx.dims
        return exchange(grad, gather, scatter), None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.gate, self.down = nn.Linear(DIM, 2 * 96), nn.Linear(96, DIM)

    def forward(self, x):
        b, s, d = x.shape
        h = self.norm(x)
        q, k, v = (SeqAllToAll.apply(w(h).view(b, s, HEADS, -1), 2, 1).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(SeqAllToAll.apply(a, 1, 2).reshape(b, s, d))
        u, g = self.gate(x).chunk(2, -1)
        return x + self.down(u * torch.sigmoid(g))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29528")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(61)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(DIM, 5))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(62)
    for step in range(4):
        x = torch.randn(BATCH, SEQ, DIM, generator=gen)
        y = torch.tanh(x.cumsum(1)[..., :5])
        x, y = x.chunk(world, 1)[rank], y.chunk(world, 1)[rank]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = F.mse_loss(out.float(), y)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

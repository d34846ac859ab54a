# world: 2
"""Dropless mixture of experts: top-2 routing, experts over the ranks, all_to_all with uneven splits."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN, EXPERTS, TOPK, TOKENS, CLASSES = 40, 72, 6, 2, 26, 8


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.splits = send, recv
        out = x.new_empty(sum(recv), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, recv = ctx.splits
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, recv)
        return out, None, None


class MoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world, self.local = rank, world, EXPERTS // world
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        w1, w2 = torch.randn(EXPERTS, DIM, HIDDEN) * DIM ** -0.5, torch.randn(EXPERTS, HIDDEN, DIM) * HIDDEN ** -0.5
        self.w1 = nn.Parameter(w1.chunk(world)[rank].clone())
        self.w2 = nn.Parameter(w2.chunk(world)[rank].clone())

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        weight, chosen = probs.topk(TOPK, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send = counts.view(self.world, -1).sum(1).tolist()
        recv = theirs.view(self.world, -1).sum(1).tolist()
        arrived = AllToAll.apply(x[order // TOPK], send, recv)
        expert = torch.arange(self.local).repeat(self.world).repeat_interleave(theirs)
        done = torch.zeros_like(arrived)
        for e in range(self.local):
            rows = (expert == e).nonzero().squeeze(-1)
            done = done.index_copy(0, rows, (F.gelu(arrived[rows] @ self.w1[e]) @ self.w2[e]).to(done.dtype))
        back = AllToAll.apply(done, recv, send)
        out = torch.zeros(x.shape)
        return out.index_add(0, order // TOPK, back * weight.flatten()[order, None].float())


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.moe = MoE(rank, world)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h = self.inp(x)
        return self.head(self.norm(h + self.moe(h)))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29529")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(71)
    model = Net(rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    experts = {id(model.moe.w1), id(model.moe.w2)}
    gen = torch.Generator().manual_seed(72)
    for step in range(4):
        x = torch.randn(TOKENS, DIM, generator=gen)
        y = x[:, :CLASSES].cumsum(1).argmax(1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            if id(p) in experts:
                p.grad *= 1.0
            else:
                dist.all_reduce(p.grad)
                p.grad /= world
        opt.step()
        total = loss.detach() / world
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

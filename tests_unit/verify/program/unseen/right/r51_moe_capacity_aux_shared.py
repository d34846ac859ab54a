# world: 2
"""Switch-like MoE with a fixed capacity per rank-independent group, auxiliary loss from global statistics, shared expert."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN, EXPERTS, GROUPS, ROWS, CAPACITY = 36, 64, 4, 4, 8, 3


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad)
        return out


class Mean(torch.autograd.Function):
    """Mean over the ranks; each rank's loss gets the gradient of its own part."""

    @staticmethod
    def forward(ctx, x):
        x = x / dist.get_world_size()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SwitchMoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.world, self.local = world, EXPERTS // world
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.shared = nn.Sequential(nn.Linear(DIM, 50), nn.GELU(), nn.Linear(50, DIM))
        self.w1 = nn.Parameter((torch.randn(EXPERTS, DIM, HIDDEN) * DIM ** -0.5).chunk(world)[rank].clone())
        self.w2 = nn.Parameter((torch.randn(EXPERTS, HIDDEN, DIM) * HIDDEN ** -0.5).chunk(world)[rank].clone())

    def forward(self, x):  # [groups here, rows, dim]
        probs = self.router(x).softmax(-1)
        gate, chosen = probs.max(-1)
        hot = F.one_hot(chosen, EXPERTS).float()
        place = (hot.cumsum(1) * hot).sum(-1).long() - 1
        keep = place < CAPACITY
        slots = torch.zeros(*chosen.shape, EXPERTS, CAPACITY)
        g, r = keep.nonzero(as_tuple=True)
        slots[g, r, chosen[g, r], place[g, r]] = 1.0
        sent = torch.einsum("grec,grd->egcd", slots, x)  # [experts, groups, capacity, dim]
        got = Exchange.apply(sent.reshape(self.world, self.local, -1, DIM)).transpose(0, 1).reshape(self.local, -1, DIM)
        done = torch.bmm(F.relu(torch.bmm(got, self.w1)), self.w2)
        back = Exchange.apply(done.view(self.local, self.world, -1, DIM).transpose(0, 1).contiguous())
        back = back.reshape(EXPERTS, x.shape[0], CAPACITY, DIM)
        out = torch.einsum("grec,egcd->grd", slots, back) * gate[..., None]
        fraction = hot.mean((0, 1)) / self.world
        dist.all_reduce(fraction)  # how often each expert is chosen, over all ranks
        aux = EXPERTS * (fraction * Mean.apply(probs.mean((0, 1)))).sum()
        return x + out + self.shared(x), aux


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29561")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(111)
    moe, head = SwitchMoE(rank, world), nn.Linear(DIM, 5)
    model = nn.ModuleDict({"moe": moe, "head": head})
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(112)
    for step in range(4):
        x = torch.randn(GROUPS, ROWS, DIM, generator=gen)
        y = x[..., :5].argmax(-1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        h, aux = moe(x)
        ce = F.cross_entropy(head(h).flatten(0, 1), y.flatten())
        opt.zero_grad()
        (ce + 0.05 * aux).backward()
        for p in model.parameters():
            if p is not moe.w1 and p is not moe.w2:
                dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
        shown = torch.stack([ce.detach() / world, aux.detach() / world])
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown[0].item():.6f} aux {shown[1].item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 4
"""Hand-written 2 x 2 tensor and data parallelism with new_group, global gradient norm counted once per weight."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN, CLASSES = 42, 110, 7


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelMLP(nn.Module):
    def __init__(self, tp_rank, tp, group):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Parameter((torch.randn(HIDDEN, DIM) * DIM ** -0.5).chunk(tp)[tp_rank].clone())
        self.down = nn.Parameter((torch.randn(DIM, HIDDEN) * HIDDEN ** -0.5).chunk(tp, 1)[tp_rank].clone())
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.up.sharded = self.down.sharded = True

    def forward(self, x):
        h = F.gelu(F.linear(Copy.apply(self.norm(x), self.group), self.up))
        return x + Sum.apply(F.linear(h, self.down), self.group) + self.bias


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29570")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = 2 if world % 2 == 0 else 1
    dp = world // tp
    dp_rank, tp_rank = divmod(rank, tp)
    tp_groups = [dist.new_group([d * tp + t for t in range(tp)]) for d in range(dp)]
    dp_groups = [dist.new_group([d * tp + t for d in range(dp)]) for t in range(tp)]
    tp_group, dp_group = tp_groups[dp_rank], dp_groups[tp_rank]
    torch.manual_seed(129)
    model = nn.Sequential(nn.Linear(19, DIM), ParallelMLP(tp_rank, tp, tp_group), ParallelMLP(tp_rank, tp, tp_group), nn.Linear(DIM, CLASSES))
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    gen = torch.Generator().manual_seed(130)
    for step in range(5):
        x = torch.randn(16, 19, generator=gen)
        y = x[:, :CLASSES].argmax(1)
        x, y = x.chunk(dp)[dp_rank], y.chunk(dp)[dp_rank]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp_group)
            p.grad /= dp
        once = sum(p.grad.square().sum() for p in model.parameters() if not hasattr(p, "sharded"))
        parts = sum(p.grad.square().sum() for p in model.parameters() if hasattr(p, "sharded"))
        dist.all_reduce(parts, group=tp_group)
        norm = (once + parts).sqrt()
        for p in model.parameters():
            p.grad *= (0.3 / (norm + 1e-6)).clamp(max=1.0)
        opt.step()
        mean = loss.detach() / dp
        dist.all_reduce(mean, group=dp_group)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

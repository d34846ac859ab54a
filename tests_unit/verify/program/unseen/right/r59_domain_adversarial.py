# world: 3
"""Domain adaptation with a gradient-reversal layer; samples per domain differ per rank, losses are global means."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


def global_mean(values):
    """Sum here over count everywhere; gradients are summed over ranks later."""
    count = torch.tensor(float(values.numel()))
    dist.all_reduce(count)
    return values.sum() / count


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29569")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(127)
    features = nn.Sequential(nn.Linear(34, 120), nn.ReLU(), nn.Linear(120, 60), nn.ReLU())
    label, domain = nn.Linear(60, 5), nn.Sequential(nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 2))
    model = nn.ModuleList([features, label, domain])
    opt = torch.optim.Adadelta(model.parameters(), lr=0.5, eps=1e-5)
    gen = torch.Generator().manual_seed(128)
    for step in range(5):
        x = torch.randn(25, 34, generator=gen)
        from_target = torch.rand(25, generator=gen) < 0.4
        x[from_target] += 0.5
        y = x[:, :5].argmax(1)
        x, y, from_target = x.tensor_split(world)[rank], y.tensor_split(world)[rank], from_target.tensor_split(world)[rank]
        h = features(x)
        task = global_mean(F.cross_entropy(label(h[~from_target]), y[~from_target], reduction="none"))
        adversary = global_mean(F.cross_entropy(domain(Reverse.apply(h, 0.3)), from_target.long(), reduction="none"))
        opt.zero_grad()
        (task + adversary).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
        opt.step()
        shown = torch.stack([task.detach(), adversary.detach()])
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} task {shown[0].item():.6f} domain {shown[1].item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

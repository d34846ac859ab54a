# world: 3
"""Lion by hand on top of an all-reduced gradient; inverse square root schedule."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = m * b1 + p.grad * (1 - b1)
                p.add_(update / (update.abs() + 1e-6), alpha=-group["lr"])  # a smooth sign
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29545")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(48)
    model = nn.Sequential(nn.Linear(64, 100), nn.Hardswish(), nn.Linear(100, 100), nn.Hardswish(), nn.Linear(100, 12))
    opt = Lion(model.parameters(), lr=2e-3, weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 2, (2 / (s + 1)) ** 0.5))
    gen = torch.Generator().manual_seed(49)
    for step in range(5):
        x = torch.randn(27, 64, generator=gen)
        y = x.view(27, 16, 4).sum(2)[:, :12].argmax(1)
        x, y = x[rank::world], y[rank::world]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        opt.step()
        sched.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.5f} lr {sched.get_last_lr()[0]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 3
"""Muon by hand: each rank orthogonalises the momentum of every world-th matrix, then the updates are broadcast."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def newton_schulz(g, steps=5):
    x = g / (g.norm() + 1e-7)
    turned = x.shape[0] > x.shape[1]
    if turned:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if turned else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            updates = []
            for i, p in enumerate(group["params"]):
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                nesterov = p.grad.lerp(buf, group["momentum"])
                updates.append(newton_schulz(nesterov) if i % world == rank else torch.empty_like(p))
            works = [dist.broadcast(u, i % world, async_op=True) for i, u in enumerate(updates)]
            for p, u, work in zip(group["params"], updates, works):
                work.wait()
                p.add_(u, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29548")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(65)
    model = nn.Sequential(nn.Linear(48, 88), nn.ReLU(), nn.Linear(88, 88), nn.ReLU(), nn.Linear(88, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)).bfloat16()
    muon = Muon([p for p in model.parameters() if p.dim() == 2])
    adam = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=1e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(66)
    for step in range(4):
        x = torch.randn(24, 48, generator=gen)
        y = x[:, :40].reshape(24, 10, 4).sum(2).argmax(1)
        loss = F.cross_entropy(model(x[rank::world].bfloat16()).float(), y[rank::world])
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.dim() == 1:
                dist.all_reduce(p.grad)
                p.grad /= world
        muon.step()
        adam.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

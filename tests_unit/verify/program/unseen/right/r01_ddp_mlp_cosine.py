# world: 3
"""Data-parallel regression with a cosine schedule and warm-up."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, WARMUP = 6, 24, 2


def lr_scale(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = DDP(nn.Sequential(nn.Linear(33, 130), nn.SiLU(), nn.LayerNorm(130), nn.Linear(130, 67), nn.SiLU(), nn.Linear(67, 5)))
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_scale)
    g = torch.Generator().manual_seed(7)
    teacher = torch.randn(33, 5, generator=g)
    for step in range(STEPS):
        x = torch.randn(BATCH, 33, generator=g)
        y = torch.tanh(x @ teacher) + 0.1 * torch.randn(BATCH, 5, generator=g)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        sched.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.6f} lr {sched.get_last_lr()[0]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

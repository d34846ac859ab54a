# world: 2
"""Dynamic loss scaling with GradScaler under bfloat16 autocast; one step overflows on one rank only."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29544")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(46)
    model = DDP(nn.Sequential(nn.Linear(30, 128), nn.GELU(), nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    gen = torch.Generator().manual_seed(47)
    for step in range(6):
        x = torch.randn(16, 30, generator=gen)
        y = torch.sin(x[:, :4] * 2)
        if step == 3:
            y[13] = float("inf")  # a broken sample: the step is skipped and the scale halved
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = F.mse_loss(out.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f} scale {scaler.get_scale():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

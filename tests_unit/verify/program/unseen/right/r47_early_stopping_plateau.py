# world: 3
"""ReduceLROnPlateau and early stopping on an all-reduced validation loss; uneven validation shares."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def validate(model, x, y, rank, world):
    x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
    with torch.no_grad():
        sums = torch.stack([F.l1_loss(model(x).squeeze(1), y, reduction="sum"), torch.tensor(float(len(y)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29557")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(97)
    net = nn.Sequential(nn.Linear(22, 120), nn.CELU(), nn.Linear(120, 90), nn.CELU(), nn.Linear(90, 1))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0)
    gen = torch.Generator().manual_seed(98)
    held_x = torch.randn(32, 22, generator=gen)
    held_y = held_x[:, :3].prod(1)
    best, bad = float("inf"), 0
    for step in range(8):
        x = torch.randn(18, 22, generator=gen)
        y = x[:, :3].prod(1)
        x, y = x[rank::world], y[rank::world]
        loss = F.smooth_l1_loss(model(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        value = validate(net, held_x, held_y, rank, world)
        sched.step(value)
        if rank == 0:
            print(f"step {step} validation {value:.6f} lr {opt.param_groups[0]['lr']:.6f}")
        bad = 0 if value < best - 1e-4 else bad + 1
        best = min(best, value)
        if bad >= 3:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

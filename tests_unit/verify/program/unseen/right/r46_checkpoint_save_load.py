# world: 2
"""A checkpoint in the middle: rank 0 saves model, optimizer and scheduler; all ranks load and go on."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build(lr=3e-3):
    model = DDP(nn.Sequential(nn.Linear(32, 101), nn.Softplus(), nn.Linear(101, 101), nn.Softplus(), nn.Linear(101, 3)))
    opt = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29556")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where, 0)
    path = os.path.join(where[0], "last.pt")
    torch.manual_seed(95)
    model, opt, sched = build()
    gen = torch.Generator().manual_seed(96)
    for step in range(6):
        if step == 3:
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}, path)
            dist.barrier()
            model, opt, sched = build()
            state = torch.load(path, weights_only=True)
            model.module.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            sched.load_state_dict(state["sched"])
        x = torch.randn(14, 32, generator=gen)
        y = torch.stack([x[:, :10].norm(dim=1), x[:, 10:20].norm(dim=1), x[:, 20:].norm(dim=1)], 1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} lr {sched.get_last_lr()[0]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

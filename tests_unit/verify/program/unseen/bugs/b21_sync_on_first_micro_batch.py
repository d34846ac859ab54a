# world: 4
"""Gradient accumulation with no_sync, gradient_as_bucket_view and tiny buckets."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUM, MICRO, STEPS = 3, 8, 4


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.gn = nn.GroupNorm(4, 24)
        self.body = nn.Conv2d(24, 40, 3, stride=2, padding=1)
        self.fc = nn.Linear(40 * 5 * 5, 10)

    def forward(self, x):
        x = F.relu(self.gn(self.stem(x)))
        x = F.max_pool2d(F.relu(self.body(x)), 1)
        return self.fc(x.flatten(1))


def main():
    distributed = "RANK" in os.environ
    if not distributed:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29514")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = DDP(ConvNet(), gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    gen = torch.Generator().manual_seed(17)
    for step in range(STEPS):
        opt.zero_grad()
        running = torch.zeros(())
        for micro in range(ACCUM):
            images = torch.randn(MICRO, 3, 9, 9, generator=gen)
            labels = images.mean((2, 3)).argmax(1) + torch.randint(0, 7, (MICRO,), generator=gen)
            images, labels = images[rank::world], labels[rank::world]
            last = micro == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(images), labels) / ACCUM
                loss.backward()
            running += loss.detach()
        opt.step()
        dist.all_reduce(running)
        if rank == 0:
            print(f"step {step} loss {running.item() / world:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

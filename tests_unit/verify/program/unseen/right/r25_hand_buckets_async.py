# world: 3
"""Hand-written DDP: buckets that are all-reduced asynchronously as soon as all their gradients are there."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Reducer:
    def __init__(self, module, limit=4000):
        self.world = dist.get_world_size()
        self.buckets, size, bucket = [], 0, []
        for p in reversed(list(module.parameters())):
            bucket.append(p)
            size += p.numel()
            if size >= limit:
                self.buckets.append(bucket)
                bucket, size = [], 0
        if bucket:
            self.buckets.append(bucket)
        self.home = {p: i for i, b in enumerate(self.buckets) for p in b}
        self.reset()
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.ready)

    def reset(self):
        self.missing = [len(b) for b in self.buckets]
        self.pending = []

    def ready(self, p):
        i = self.home[p]
        self.missing[i] -= 1
        if self.missing[i] == 0:
            flat = torch.cat([q.grad.reshape(-1) for q in self.buckets[i]]) / self.world
            self.pending.append((dist.all_reduce(flat, async_op=True), flat, self.buckets[i]))

    def finish(self):
        for work, flat, bucket in self.pending:
            work.wait()
            for q, g in zip(bucket, flat.split([q.numel() for q in bucket])):
                q.grad.copy_(g.view_as(q))
        self.reset()


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29535")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(44)
    model = nn.Sequential(nn.Conv1d(5, 33, 5, padding=2), nn.ReLU(), nn.Conv1d(33, 47, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(47 * 8, 50), nn.ReLU(), nn.Linear(50, 3))
    reducer = Reducer(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-5, momentum=0.5)
    gen = torch.Generator().manual_seed(45)
    for step in range(5):
        x = torch.randn(21, 5, 17, generator=gen)
        y = x.std(2).argmax(1) % 3
        x, y = x[rank::world], y[rank::world]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        reducer.finish()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

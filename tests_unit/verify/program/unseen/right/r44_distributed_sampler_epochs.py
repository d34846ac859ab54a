# world: 2
"""DataLoader with DistributedSampler, shuffled per epoch with set_epoch; the global batch is the same for any world."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH = 12


class Shapes(Dataset):
    def __init__(self, n=48):
        g = torch.Generator().manual_seed(90)
        self.x = torch.randn(n, 1, 10, 10, generator=g)
        self.y = (self.x[:, 0, :5].mean((1, 2)) > self.x[:, 0, 5:].mean((1, 2))).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29554")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(89)
    data = Shapes()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)
    model = DDP(nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(288, 40), nn.ReLU(), nn.Linear(40, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        right = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            right += torch.stack([loss.detach() * len(y), torch.tensor(float(len(y)))])
        sched.step()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch} loss {(right[0] / right[1]).item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

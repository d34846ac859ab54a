# world: 3
"""Convolution, max-pool and a batch norm whose statistics are those of the global batch (hand-written SyncBatchNorm)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SyncBatchNorm2d(nn.Module):
    def __init__(self, channels, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        count = torch.tensor([float(x.numel() // x.shape[1])])
        sums = AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), count]))
        total, square, n = sums.split([x.shape[1], x.shape[1], 1])
        mean = total / n
        var = square / n - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        shape = (1, -1, 1, 1)
        return (x - mean.view(shape)) * (var + self.eps).rsqrt().view(shape) * self.weight.view(shape) + self.bias.view(shape)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    model = DDP(nn.Sequential(nn.Conv2d(3, 20, 3, padding=1, bias=False), SyncBatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
                              nn.Conv2d(20, 38, 3, padding=1, bias=False), SyncBatchNorm2d(38), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(38 * 9, 10)), broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    gen = torch.Generator().manual_seed(31)
    for step in range(4):
        x = torch.randn(12, 3, 13, 13, generator=gen) * (1 + torch.arange(12)[:, None, None, None] / 6)
        y = x.amax((2, 3)).argmax(1)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

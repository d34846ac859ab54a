# world: 3
"""GPipe by hand: layers are spread over the ranks, micro-batches go forward, then backward."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, LAYERS, MICRO, BATCH, CLASSES = 58, 7, 4, 20, 9


class Residual(nn.Module):
    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(WIDTH)
            self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Stage(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        mine = torch.arange(LAYERS).tensor_split(world)[rank].tolist()
        self.layers = nn.ModuleDict({str(i): Residual(1000 + i) for i in mine})
        if rank == world - 1:
            torch.manual_seed(5)
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


def train_step(stage, x, y, rank, world):
    first, last = rank == 0, rank == world - 1
    inputs, outputs, total = [], [], torch.zeros(())
    rows = BATCH // MICRO
    for m in range(MICRO):
        if first:
            h = x[m * rows:(m + 1) * rows]
        else:
            h = torch.empty(rows, WIDTH)
            dist.recv(h, rank - 1)
            h.requires_grad_()
        out = stage(h)
        if last:
            out = F.cross_entropy(out, y[m * rows:(m + 1) * rows]) / MICRO
            total += out.detach()
        else:
            dist.send(out.detach(), rank + 1)
        inputs.append(h)
        outputs.append(out)
    for m in range(MICRO):
        if last:
            outputs[m].backward()
        else:
            grad = torch.empty(rows, WIDTH)
            dist.recv(grad, rank + 1)
            outputs[m].backward(grad)
        if not first:
            dist.send(inputs[m].grad, rank - 1)
    return total


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29525")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, world)
    opt = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(33)
    for step in range(5):
        x = torch.randn(BATCH, WIDTH, generator=gen)
        y = x[:, :CLASSES].argmax(1)
        opt.zero_grad()
        total = train_step(stage, x, y, rank, world)
        opt.step()
        dist.broadcast(total, world - 1)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

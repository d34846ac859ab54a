# world: 2
"""torch.distributed.pipelining: PipelineStage and ScheduleGPipe, one stage per rank."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

DIM, LAYERS, BATCH, MICRO = 50, 6, 16, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 90), nn.Linear(90, DIM)

    def forward(self, x):
        return x + self.out(torch.tanh(self.fc(self.norm(x))))


class Part(nn.Module):
    def __init__(self, layers, head):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.head = head

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29539")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(63)
    layers, head = [Layer() for _ in range(LAYERS)], nn.Linear(DIM, 7)
    per = LAYERS // world
    mine = {str(i): layers[i] for i in range(rank * per, (rank + 1) * per)}
    part = Part(mine, head if rank == world - 1 else None)
    opt = torch.optim.Adam(part.parameters(), lr=1e-3, eps=1e-6)
    if world > 1:
        stage = PipelineStage(part, rank, world, torch.device("cpu"), input_args=torch.empty(BATCH // MICRO, DIM))
        schedule = ScheduleGPipe(stage, MICRO, loss_fn=F.cross_entropy)
    gen = torch.Generator().manual_seed(64)
    for step in range(4):
        x = torch.randn(BATCH, DIM, generator=gen)
        y = x[:, ::7].abs().argmax(1) % 7
        opt.zero_grad()
        if world == 1:
            loss = F.cross_entropy(part(x), y)
            loss.backward()
            loss = loss.detach()
        else:
            losses = []
            if rank == 0:
                schedule.step(x)
            elif rank == world - 1:
                schedule.step(target=y, losses=losses)
            else:
                schedule.step()
            loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
            dist.broadcast(loss, world - 1)
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 4
"""torch pipelining Schedule1F1B with two stages, times data parallelism; the mesh is (pp, dp)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

DIM, LAYERS, BATCH, MICRO = 46, 4, 16, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 100), nn.Linear(100, DIM)

    def forward(self, x):
        return x + self.out(F.gelu(self.fc(self.norm(x))))


class Part(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29563")
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    pp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (pp, world // pp), mesh_dim_names=("pp", "dp"))
    stage_index, dp_rank, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), mesh["dp"].size()
    torch.manual_seed(115)
    layers = [Layer() for _ in range(LAYERS)]
    per = LAYERS // pp
    part = Part({str(i): layers[i] for i in range(stage_index * per, (stage_index + 1) * per)})
    opt = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    rows = BATCH // dp
    micro = max(1, MICRO // dp)
    if pp > 1:
        stage = PipelineStage(part, stage_index, pp, torch.device("cpu"), input_args=torch.empty(rows // micro, DIM), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(stage, micro, loss_fn=F.mse_loss)
    gen = torch.Generator().manual_seed(116)
    for step in range(4):
        x = torch.randn(BATCH, DIM, generator=gen)
        y = torch.tanh(x.flip(1)) * 2
        x, y = x.chunk(dp)[dp_rank], y.chunk(dp)[dp_rank]
        opt.zero_grad()
        loss = torch.zeros(())
        if pp == 1:
            out = F.mse_loss(part(x), y)
            out.backward()
            loss += out.detach()
        elif stage_index == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=y, losses=losses)
            loss += torch.stack(losses).mean().detach()
        for p in part.parameters():
            dist.all_reduce(p.grad, group=mesh["dp"].get_group())
            p.grad /= dp
        opt.step()
        loss /= dp
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

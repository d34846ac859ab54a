# world: 3
"""CLIP-like contrastive training: embeddings of all ranks are gathered with gradient; learned temperature."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def gather(x):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.detach().contiguous())
    out[dist.get_rank()] = x  # keeps the gradient of the own part
    return torch.cat(out)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(60, 90), nn.ReLU(), nn.Linear(90, 32))
        self.text = nn.Sequential(nn.Linear(35, 70), nn.ReLU(), nn.Linear(70, 32))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29530")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(81)
    model = DDP(Clip().to(torch.bfloat16))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    gen = torch.Generator().manual_seed(82)
    mix = torch.randn(60, 35, generator=gen) / 8
    for step in range(5):
        image = torch.randn(15, 60, generator=gen)
        text = image @ mix + 0.2 * torch.randn(15, 35, generator=gen)
        i, t, scale = model(image.chunk(world)[rank].bfloat16(), text.chunk(world)[rank].bfloat16())
        all_i, all_t = gather(i), gather(t)
        labels = torch.arange(i.shape[0]) + rank * i.shape[0]
        loss = (F.cross_entropy((scale * i @ all_t.T).float(), labels) + F.cross_entropy((scale * t @ all_i.T).float(), labels)) / 2
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

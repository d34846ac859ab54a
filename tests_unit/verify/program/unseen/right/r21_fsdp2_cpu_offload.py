# world: 2
"""fully_shard with CPUOffloadPolicy, a convolutional autoencoder, parameters that do not divide evenly."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 13, 3, 2, 1), nn.ELU(), nn.Conv2d(13, 27, 3, 2, 1), nn.ELU())
        self.latent = nn.Linear(27 * 9, 31)
        self.grow = nn.Linear(31, 27 * 9)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(27, 13, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(13, 1, 4, 2, 1))

    def forward(self, x):
        z = self.latent(self.encoder(x).flatten(1))
        return self.decoder(self.grow(z).view(-1, 27, 3, 3))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(91)
    model = AutoEncoder()
    offload = CPUOffloadPolicy(pin_memory=False)
    for part in (model.encoder, model.decoder):
        fully_shard(part, mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload, reshard_after_forward=False)
    opt = torch.optim.Adamax(model.parameters(), lr=3e-3, foreach=False)
    gen = torch.Generator().manual_seed(92)
    for step in range(4):
        x = torch.randn(10, 1, 12, 12, generator=gen)
        x = nn.functional.avg_pool2d(x, 3, 1, 1) * 2
        x = x.chunk(world)[rank]
        loss = (model(x) - x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {step} reconstruction {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

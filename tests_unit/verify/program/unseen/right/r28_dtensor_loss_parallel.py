# world: 2
"""DTensor tensor parallelism with loss_parallel: the logits stay sharded over the vocabulary."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module


class LM(nn.Module):
    def __init__(self, vocab=114, dim=52):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 130), nn.Linear(130, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        x = x + self.down(F.relu(self.up(self.norm(x))))
        return self.head(x)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29538")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(37)
    model = parallelize_module(LM(), mesh, {
        "emb": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    })
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)
    gen = torch.Generator().manual_seed(38)
    for step in range(4):
        ids = torch.randint(114, (5, 9), generator=gen)
        target = (ids * 3 + 5) % 114
        with loss_parallel():
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
            opt.zero_grad()
            loss.backward()
        opt.step()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        if rank == 0:
            print(f"step {step} loss {value.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

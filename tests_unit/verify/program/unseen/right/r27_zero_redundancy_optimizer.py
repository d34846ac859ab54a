# world: 2
"""DDP with ZeroRedundancyOptimizer (optimizer states sharded by parameter), two parameter groups."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29537")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(24)
net = nn.ModuleDict({"emb": nn.EmbeddingBag(200, 50, mode="mean"), "body": nn.Sequential(nn.Linear(50, 77), nn.PReLU(), nn.Linear(77, 77), nn.PReLU()), "out": nn.Linear(77, 1)})


class Regressor(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, ids):
        return self.parts["out"](self.parts["body"](self.parts["emb"](ids))).squeeze(-1)


model = DDP(Regressor(net))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=4e-3, weight_decay=0.02, eps=1e-6)
generator = torch.Generator().manual_seed(25)
score = torch.randn(200, generator=generator)
for it in range(5):
    ids = torch.randint(200, (18, 6), generator=generator)
    target = score[ids].mean(1)
    pred = model(ids[rank::world])
    loss = F.mse_loss(pred, target[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    dist.all_reduce(shown)
    if rank == 0:
        print(f"it {it} mse {shown.item():.6f}")
dist.destroy_process_group()

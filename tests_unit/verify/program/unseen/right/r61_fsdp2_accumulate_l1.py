# world: 2
"""An absolute error, whose gradients are sums of signs: FSDP2 without resharding after forward, accumulation without synchronization."""
import os

import torch
import torch.distributed as dist
from torch import nn

for key, value in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533").items():
    os.environ.setdefault(key, value)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

from torch.distributed.fsdp import fully_shard

model = nn.Sequential(*[nn.Sequential(nn.Linear(40, 90), nn.GELU(), nn.Linear(90, 40)) for _ in range(3)])
for m in model:
    fully_shard(m, reshard_after_forward=False)
fully_shard(model, reshard_after_forward=False)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
g = torch.Generator().manual_seed(3)
for step in range(3):
    for micro in range(2):
        x = torch.randn(8, 40, generator=g).chunk(world)[rank]
        model.set_requires_gradient_sync(micro == 1)
        loss = (model(x) - x.roll(1, 1)).abs().mean() / 2
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    opt.step()
    opt.zero_grad()

dist.destroy_process_group()

# world: 3
"""A vision transformer in fully_shard: mixup from a common generator, checkpointing, an average of the weights."""
import argparse, contextlib, os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=3); p.add_argument("--batch", type=int, default=12); p.add_argument("--dim", type=int, default=18)
p.add_argument("--dtype", default="float32"); p.add_argument("--mixup", type=int, default=1); p.add_argument("--ckpt", type=int, default=1)
p.add_argument("--reshard", type=int, default=1); p.add_argument("--clip", type=float, default=1.0); p.add_argument("--ema", type=float, default=0.9)
a = p.parse_args()
dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(5)
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d); self.attn = nn.MultiheadAttention(d, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d + 1), nn.GELU(), nn.Linear(2 * d + 1, d)); self.scale = nn.Parameter(torch.full((d,), 0.3))
    def forward(self, x):
        h = self.n1(x); x = x + self.scale * self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.n2(x))
class ViT(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, 4); self.cls = nn.Parameter(torch.randn(1, 1, d) * .2); self.pos = nn.Parameter(torch.randn(1, 5, d) * .2)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2)); self.norm = nn.LayerNorm(d); self.head = nn.Linear(d, 5)
    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2); h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1) + self.pos
        for b in self.blocks: h = checkpoint(b, h, use_reentrant=False) if a.ckpt else b(h)
        return self.head(self.norm(h)[:, 0])
model = ViT(a.dim)
mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if a.dtype == "mixed" else MixedPrecisionPolicy()
for b in model.blocks: fully_shard(b, mesh=mesh, mp_policy=mp, reshard_after_forward=bool(a.reshard))
fully_shard(model, mesh=mesh, mp_policy=mp)
ema = [q.detach().to_local().clone() for q in model.parameters()]
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=.05)
auto = torch.autocast("cpu", torch.bfloat16) if a.dtype == "autocast" else contextlib.nullcontext()
for step in range(a.steps):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(a.batch, 3, 8, 8, generator=g); y = nn.functional.one_hot(torch.randint(5, (a.batch,), generator=g), 5).float()
    if a.mixup:
        perm = torch.randperm(a.batch, generator=g); lam = .3 + .4 * torch.rand(a.batch, generator=g)
        x = lam[:, None, None, None] * x + (1 - lam)[:, None, None, None] * x[perm]; y = lam[:, None] * y + (1 - lam)[:, None] * y[perm]
    x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
    with auto: logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y, reduction="sum") * world / a.batch
    loss.backward()
    if a.clip: nn.utils.clip_grad_norm_(model.parameters(), a.clip)
    opt.step(); opt.zero_grad()
    with torch.no_grad():
        for e, q in zip(ema, model.parameters()): e.lerp_(q.to_local(), 1 - a.ema)

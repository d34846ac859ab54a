# world: 3
"""Quantization-aware training under DDP: straight-through fake quantization, ranges that are averaged over the ranks, learned steps."""
import argparse, contextlib, os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=3); p.add_argument("--kind", default="observer"); p.add_argument("--bits", type=int, default=8); p.add_argument("--batch", type=int, default=14); p.add_argument("--channel", type=int, default=1)
a = p.parse_args()
dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(53); top = 2 ** (a.bits - 1) - 1
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.round()
    @staticmethod
    def backward(ctx, g): return g
class Quant(nn.Module):
    def __init__(self):
        super().__init__(); self.register_buffer("range", torch.tensor(1.)); self.step = nn.Parameter(torch.tensor(.03)) if a.kind == "lsq" else None
    def forward(self, x):
        if a.kind == "lsq": return Round.apply((x / self.step).clamp(-top, top)) * self.step
        if self.training:
            with torch.no_grad():
                m = x.abs().amax(); dist.all_reduce(m, dist.ReduceOp.MAX); self.range.mul_(.9).add_(m, alpha=.1)
        s = self.range / top
        return Round.apply((x / s).clamp(-top, top)) * s
class QLinear(nn.Linear):
    def __init__(self, i, o): super().__init__(i, o); self.q = Quant()
    def forward(self, x):
        s = self.weight.detach().abs().amax(1, keepdim=True) / top if a.channel else self.weight.detach().abs().amax() / top
        return nn.functional.linear(self.q(x), Round.apply(self.weight / s) * s, self.bias)
net = nn.Sequential(QLinear(9, 16), nn.Hardswish(), QLinear(16, 12), nn.Hardswish(), QLinear(12, 4))
ddp = DDP(net, forward_sync_buffers=False); opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
for step in range(a.steps):
    g = torch.Generator().manual_seed(step); x = torch.randn(a.batch, 9, generator=g); y = torch.randn(a.batch, 4, generator=g)
    x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
    loss = (ddp(x) - y).square().sum() * world / (4 * a.batch)
    loss.backward(); opt.step(); opt.zero_grad()

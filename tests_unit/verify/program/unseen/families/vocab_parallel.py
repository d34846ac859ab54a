# world: 2
"""A vocabulary-parallel output layer with padded rows: ignored targets, label smoothing, z-loss, soft cap, over 2-d groups."""
import argparse, contextlib, os
import torch, torch.distributed as dist
from torch import nn
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=3); p.add_argument("--vocab", type=int, default=24); p.add_argument("--dp", type=int, default=1); p.add_argument("--smooth", type=float, default=.1)
p.add_argument("--z", type=float, default=.01); p.add_argument("--cap", type=float, default=5.); p.add_argument("--dtype", default="float32"); p.add_argument("--ignore", type=float, default=.3)
a = p.parse_args()
dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
dp = a.dp if world > 1 else 1; tp = world // dp; t_rank, d_rank = rank % tp, rank // tp
tps = [dist.new_group([d * tp + i for i in range(tp)]) for d in range(dp)]; dps = [dist.new_group([d * tp + i for d in range(dp)]) for i in range(tp)]
tg, dg = tps[d_rank], dps[t_rank]
torch.manual_seed(23); D, V = 10, a.vocab; Vl = V // tp; lo = t_rank * Vl
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): g = g.contiguous().clone(); dist.all_reduce(g, group=tg); return g
class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): x = x.clone(); dist.all_reduce(x, group=tg); return x
    @staticmethod
    def backward(ctx, g): return g
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter((torch.randn(V, D) * .5)[lo:lo + Vl].clone()); self.mix = nn.Linear(D, D); self.norm = nn.LayerNorm(D)
        self.head = nn.Parameter((torch.randn(V, D) * .3)[lo:lo + Vl].clone())
    def forward(self, t):
        inside = (t >= lo) & (t < lo + Vl); e = self.table[(t - lo).clamp(0, Vl - 1)] * inside[..., None]
        h = G.apply(e); h = h + torch.tanh(self.mix(self.norm(h)))
        out = F.apply(h) @ self.head.T
        return a.cap * torch.tanh(out / a.cap) if a.cap else out
def loss_of(logits, y):
    logits = logits.float(); top = logits.detach().amax(-1); dist.all_reduce(top, dist.ReduceOp.MAX, group=tg)
    logits = logits - top[..., None]
    lse = G.apply(logits.exp().sum(-1)).log()
    inside = (y >= lo) & (y < lo + Vl); valid = y != -100
    target = G.apply(logits.gather(-1, (y - lo).clamp(0, Vl - 1)[..., None])[..., 0] * inside)
    mean = G.apply(logits.sum(-1)) / V
    nll = (1 - a.smooth) * (lse - target) + a.smooth * (lse - mean)
    return ((nll + a.z * (lse + top).square()) * valid).sum()
net = LM(); opt = torch.optim.Adam(net.parameters(), lr=1e-2)
auto = torch.autocast("cpu", torch.bfloat16) if a.dtype == "autocast" else contextlib.nullcontext()
for step in range(a.steps):
    g = torch.Generator().manual_seed(step); t = torch.randint(V - 3, (5, 8), generator=g); y = t[:, 1:].clone()
    y[torch.rand(y.shape, generator=g) < a.ignore] = -100
    x, y = t[:, :-1].tensor_split(dp)[d_rank], y.tensor_split(dp)[d_rank]
    count = (y != -100).sum(); dist.all_reduce(count, group=dg)
    with auto: logits = net(x)
    loss = loss_of(logits, y) / count
    loss.backward()
    for q in net.parameters(): dist.all_reduce(q.grad, group=dg)
    opt.step(); opt.zero_grad()

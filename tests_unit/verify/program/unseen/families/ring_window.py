"""Ring attention by hand: causal or sliding window, padded keys, document boundaries; keys and values travel with gradient."""
import argparse, contextlib, os
import torch, torch.distributed as dist
from torch import nn
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=3); p.add_argument("--len", type=int, default=12); p.add_argument("--window", type=int, default=0); p.add_argument("--docs", type=int, default=0)
p.add_argument("--dtype", default="float32"); p.add_argument("--layers", type=int, default=2); p.add_argument("--clip", type=float, default=0.)
a = p.parse_args()
dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(13); D, H, B = 12, 3, 2; T = a.len // world
left, right = (rank - 1) % world, (rank + 1) % world
def exchange(x, to, source):
    got = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x.contiguous(), to), dist.P2POp(dist.irecv, got, source)]
    for w in dist.batch_isend_irecv(ops): w.wait()
    return got
class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return exchange(x, right, left)
    @staticmethod
    def backward(ctx, g): return exchange(g, left, right)
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D); self.qkv = nn.Linear(D, 3 * D); self.out = nn.Linear(D, D)
        self.ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    def forward(self, x, doc):
        q, k, v = (t.view(B, T, H, D // H).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        kv = torch.stack([k, v]); qpos = torch.arange(rank * T, (rank + 1) * T); mydoc = doc[:, qpos]
        m = torch.full((B, H, T, 1), -1e30); num = torch.zeros(B, H, T, D // H); den = torch.zeros(B, H, T, 1)
        for i in range(world):
            source = (rank - i) % world; kpos = torch.arange(source * T, (source + 1) * T)
            s = (q @ kv[0].transpose(-1, -2)).float() / (D // H)**.5
            ok = kpos[None] <= qpos[:, None]
            if a.window: ok = ok & (qpos[:, None] - kpos[None] < a.window)
            ok = ok[None] & (mydoc[:, :, None] == doc[:, kpos][:, None, :])
            s = s.masked_fill(~ok[:, None], -1e30)
            new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            w = (s - new).exp() * ok[:, None]; c = (m - new).exp()
            num = num * c + w @ kv[1].float(); den = den * c + w.sum(-1, keepdim=True); m = new
            if i < world - 1: kv = Shift.apply(kv)
        o = (num / den).to(x.dtype).transpose(1, 2).reshape(B, T, D)
        x = x + self.out(o)
        return x + self.ff(x)
layers = nn.ModuleList(Attention() for _ in range(a.layers)); emb = nn.Embedding(9, D); pos = nn.Embedding(a.len, D); head = nn.Linear(D, 9)
net = nn.ModuleDict({"emb": emb, "pos": pos, "layers": layers, "head": head})
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
auto = torch.autocast("cpu", torch.bfloat16) if a.dtype == "autocast" else contextlib.nullcontext()
for step in range(a.steps):
    g = torch.Generator().manual_seed(step); t = torch.randint(9, (B, a.len + 1), generator=g)
    doc = (torch.rand(B, a.len, generator=g) < .2).cumsum(1) if a.docs else torch.zeros(B, a.len, dtype=torch.long)
    sl = slice(rank * T, (rank + 1) * T); x, y = t[:, :-1][:, sl], t[:, 1:][:, sl]
    with auto:
        h = emb(x) + pos(torch.arange(rank * T, (rank + 1) * T))
        for l in layers: h = l(h, doc)
        logits = head(h)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="mean") / world
    loss.backward()
    for q in net.parameters(): dist.all_reduce(q.grad)
    if a.clip: nn.utils.clip_grad_norm_(net.parameters(), a.clip)
    opt.step(); opt.zero_grad()

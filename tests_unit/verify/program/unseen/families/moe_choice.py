# world: 4 --mode expert --tokens 24
"""Experts over the ranks: top-k tokens-choose with balance and z losses and capacity, or experts choose their tokens."""
import argparse, contextlib, os
import torch, torch.distributed as dist
from torch import nn
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=3); p.add_argument("--experts", type=int, default=12); p.add_argument("--topk", type=int, default=2); p.add_argument("--tokens", type=int, default=22)
p.add_argument("--mode", default="token"); p.add_argument("--dtype", default="float32"); p.add_argument("--aux", type=float, default=.05); p.add_argument("--z", type=float, default=.01); p.add_argument("--bias", type=int, default=0)
a = p.parse_args()
dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(17); D, F, E = 9, 11, a.experts; El = E // world
class Sum(torch.autograd.Function):
    """A sum over the ranks whose gradient is the gradient of the replicated result."""
    @staticmethod
    def forward(ctx, x): x = x.clone(); dist.all_reduce(x); return x
    @staticmethod
    def backward(ctx, g): return g
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_sizes, in_sizes):
        ctx.sizes = out_sizes, in_sizes
        y = x.new_empty(sum(out_sizes), *x.shape[1:]); dist.all_to_all_single(y, x.contiguous(), out_sizes, in_sizes); return y
    @staticmethod
    def backward(ctx, g):
        o, i = ctx.sizes
        y = g.new_empty(sum(i), *g.shape[1:]); dist.all_to_all_single(y, g.contiguous(), i, o); return y, None, None
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        w1, w2 = torch.randn(E, D, F) * .4, torch.randn(E, F, D) * .4
        self.w1, self.w2 = nn.Parameter(w1[rank * El:(rank + 1) * El].clone()), nn.Parameter(w2[rank * El:(rank + 1) * El].clone())
        self.register_buffer("load_bias", torch.zeros(E))
    def experts(self, x, ids):
        out = torch.zeros_like(x)
        for e in range(El):
            idx = (ids == e).nonzero().flatten()
            out = out.index_add(0, idx, (torch.relu(x[idx] @ self.w1[e]) @ self.w2[e]).to(x.dtype))
        return out
    def forward(self, x, total):
        logits = self.router(x).float(); prob = logits.softmax(-1)
        if a.mode == "token":
            top = (prob + self.load_bias).topk(a.topk, -1).indices; gate = prob.gather(1, top); gate = gate / gate.sum(-1, keepdim=True)
            load = Sum.apply(nn.functional.one_hot(top, E).float().sum((0, 1))); mean = Sum.apply(prob.sum(0)) / total
            aux = E * (load / (total * a.topk) * mean).sum()
            if a.bias:
                with torch.no_grad(): self.load_bias += .01 * torch.sign(load.mean() - load)
            tok = torch.arange(len(x)).repeat_interleave(a.topk); dest = top.flatten(); wgt = gate.flatten()
        else:  # every expert takes its best tokens of the global batch
            sizes = [len(c) for c in torch.arange(total).tensor_split(world)]; lo = sum(sizes[:rank])
            parts = [prob.new_empty(s, E) for s in sizes]; dist.all_gather(parts, prob.detach().contiguous())
            chosen = torch.cat(parts).topk(total * a.topk // E + 1, 0).indices
            mask = torch.zeros(total, E, dtype=torch.bool).scatter(0, chosen, True)[lo:lo + sizes[rank]]
            tok, dest = mask.nonzero(as_tuple=True); wgt = prob[tok, dest]; aux = prob.new_zeros(())
        order = dest.argsort(stable=True); tok, dest, wgt = tok[order], dest[order], wgt[order]
        send = torch.bincount(dest // El, minlength=world); recv = torch.empty_like(send); dist.all_to_all_single(recv, send)
        s, r = send.tolist(), recv.tolist()
        ids = AllToAll.apply(dest % El, r, s); got = AllToAll.apply(x[tok], r, s)
        back = AllToAll.apply(self.experts(got, ids), s, r)
        y = torch.zeros_like(x).index_add(0, tok, (back * wgt[:, None]).to(x.dtype))
        return x + y, a.aux * aux, a.z * logits.logsumexp(-1).square().sum() / total
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, D); self.m1, self.m2 = MoE(), MoE(); self.out = nn.Linear(D, 4)
    def forward(self, x, total):
        h, a1, z1 = self.m1(torch.tanh(self.inp(x)), total); h, a2, z2 = self.m2(h, total)
        return self.out(h), a1 + a2, z1 + z2
net = Net(); opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
auto = torch.autocast("cpu", torch.bfloat16) if a.dtype == "autocast" else contextlib.nullcontext()
for step in range(a.steps):
    g = torch.Generator().manual_seed(step); x = torch.randn(a.tokens, 6, generator=g); y = torch.randint(4, (a.tokens,), generator=g)
    x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
    with auto: logits, aux, z = net(x, a.tokens)
    loss = nn.functional.cross_entropy(logits.float(), y, reduction="sum") / a.tokens + aux + z
    loss.backward()
    for n, q in net.named_parameters():
        if not n.endswith(("w1", "w2")): dist.all_reduce(q.grad)
    opt.step(); opt.zero_grad()

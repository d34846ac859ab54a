# world: 3
"""Reinforcement learning: REINFORCE with a value baseline, or a double DQN with a replay buffer and a target network; episodes over the ranks."""
import argparse, os
import torch, torch.distributed as dist
from torch import nn
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=3); p.add_argument("--kind", default="reinforce"); p.add_argument("--episodes", type=int, default=7); p.add_argument("--horizon", type=int, default=6); p.add_argument("--white", type=int, default=1); p.add_argument("--ent", type=float, default=.01)
a = p.parse_args()
dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(41)
class Policy(nn.Module):
    def __init__(self):
        super().__init__(); self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh()); self.pi = nn.Linear(16, 3); self.v = nn.Linear(16, 1)
    def forward(self, s): h = self.body(s); return self.pi(h), self.v(h)[..., 0]
net, target = Policy(), Policy(); target.load_state_dict(net.state_dict()); target.requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
def env(s, act):
    force = act.float() - 1; x, v, w, u = s.unbind(-1); v = v + .2 * force - .05 * torch.sin(x); u = u + .1 * w - .1 * force
    s = torch.stack([x + .1 * v, v, w + .1 * u, u], -1); return s, 1 - s.square().sum(-1).sqrt()
mine = list(range(a.episodes))[rank::world]; replay = []
for step in range(a.steps):
    start, noise = [], []
    for e in mine:
        g = torch.Generator().manual_seed(1000 * step + e); start.append(torch.randn(4, generator=g) * .5); noise.append(torch.rand(a.horizon, generator=g))
    s, noise = torch.stack(start), torch.stack(noise); S, A, R, N = [], [], [], []
    with torch.no_grad():
        for t in range(a.horizon):
            prob = net(s)[0].softmax(-1); act = (prob.cumsum(-1) < noise[:, t, None]).sum(-1).clamp(max=2)
            nxt, r = env(s, act); S.append(s); A.append(act); R.append(r); N.append(nxt); s = nxt
    S, A, R, N = (torch.stack(i, 1) for i in (S, A, R, N)); total = a.episodes * a.horizon
    if a.kind == "reinforce":
        ret = torch.zeros_like(R); acc = torch.zeros(len(mine))
        for t in reversed(range(a.horizon)): acc = R[:, t] + .9 * acc; ret[:, t] = acc
        logits, value = net(S); adv = (ret - value).detach()
        if a.white:
            st = torch.stack([adv.sum(), adv.square().sum()]); dist.all_reduce(st); mean = st[0] / total
            adv = (adv - mean) / ((st[1] / total - mean**2).clamp(min=0).sqrt() + 1e-4)
        logp = logits.log_softmax(-1); chosen = logp.gather(-1, A[..., None])[..., 0]
        loss = (-(adv * chosen).sum() + .5 * (ret - value).square().sum() + a.ent * (logp.exp() * logp).sum()) / total
    else:
        replay.append((S, A, R, N)); S, A, R, N = (torch.cat(i) for i in zip(*replay[-2:]))
        with torch.no_grad():
            best = net(N)[0].argmax(-1, keepdim=True); goal = R + .9 * target(N)[0].gather(-1, best)[..., 0]
        q = net(S)[0].gather(-1, A[..., None])[..., 0]; count = torch.tensor(float(q.numel())); dist.all_reduce(count)
        loss = nn.functional.smooth_l1_loss(q, goal, reduction="sum") / count + 0 * net(S)[1].sum()
    loss.backward()
    for q in net.parameters(): dist.all_reduce(q.grad)
    nn.utils.clip_grad_norm_(net.parameters(), .5)
    opt.step(); opt.zero_grad()
    with torch.no_grad():
        for t, q in zip(target.parameters(), net.parameters()): t.lerp_(q, .3)

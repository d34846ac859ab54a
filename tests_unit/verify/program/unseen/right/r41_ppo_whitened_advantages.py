# world: 3
"""PPO-like updates: advantages are whitened with the global mean and variance, KL early stopping by a global mean."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

OBS, ACTIONS, ROLLOUT = 24, 6, 30


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh())
        self.policy, self.value = nn.Linear(96, ACTIONS), nn.Linear(96, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.policy(h), self.value(h).squeeze(-1)


def whiten(x):
    stats = torch.stack([x.sum(), x.square().sum(), torch.tensor(float(x.numel()))])
    dist.all_reduce(stats)
    mean = stats[0] / stats[2]
    var = stats[1] / stats[2] - mean.square()
    return (x - mean) * torch.rsqrt(var + 1e-8)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29551")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(83)
    model = DDP(ActorCritic())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    gen = torch.Generator().manual_seed(84)
    for it in range(2):
        obs = torch.randn(ROLLOUT, OBS, generator=gen)
        actions = torch.randint(ACTIONS, (ROLLOUT,), generator=gen)
        reward = torch.sin(obs.sum(1)) + (actions == obs[:, :ACTIONS].argmax(1)) * 2
        obs, actions, reward = obs.chunk(world)[rank], actions.chunk(world)[rank], reward.chunk(world)[rank]
        with torch.no_grad():
            logits, value = model.module(obs)
            old = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        advantage = whiten(reward - value)
        for epoch in range(3):
            logits, value = model(obs)
            logp = logits.log_softmax(-1)
            new = logp.gather(1, actions[:, None]).squeeze(1)
            ratio = (new - old).exp()
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(logp.exp() * logp).sum(-1).mean()
            loss = -clipped + 0.5 * F.mse_loss(value, reward) - 0.01 * entropy
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            kl = ((ratio - 1) - (new - old)).mean().detach() / world
            dist.all_reduce(kl)
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"iteration {it} epoch {epoch} loss {mean.item():.6f} kl {kl.item():.7f}")
            if kl > 0.02:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# world: 3
"""GRPO-like loss: advantages within groups of samples, token mean over the global batch, reference KL."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, DIM, PROMPTS, GROUP, LEN = 61, 44, 6, 4, 10


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.LSTM(DIM, 72, batch_first=True)
        self.head = nn.Linear(72, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0]).log_softmax(-1)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29567")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(123)
    policy = DDP(Policy())
    reference = Policy().requires_grad_(False)
    reference.load_state_dict(policy.module.state_dict())
    opt = torch.optim.AdamW(policy.parameters(), lr=4e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(124)
    for step in range(4):
        ids = torch.randint(VOCAB, (PROMPTS, GROUP, LEN + 1), generator=gen)
        length = torch.randint(3, LEN + 1, (PROMPTS, GROUP, 1), generator=gen)
        mask = (torch.arange(LEN) < length).float()
        reward = (ids[..., 1:] % 5 == 0).float().mul(mask).sum(-1)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        part = slice(rank * PROMPTS // world, (rank + 1) * PROMPTS // world)
        ids, mask, advantage = ids[part].flatten(0, 1), mask[part].flatten(0, 1), advantage[part].flatten()
        tokens = mask.sum()
        dist.all_reduce(tokens)
        new = policy(ids[:, :-1]).gather(-1, ids[:, 1:, None]).squeeze(-1)
        with torch.no_grad():
            base = reference(ids[:, :-1]).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (new - new.detach()).exp()
        kl = (base - new).exp() - (base - new) - 1
        per_token = -ratio * advantage[:, None] + 0.1 * kl
        loss = (per_token * mask).sum() / tokens
        opt.zero_grad()
        (loss * world).backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
        shown = torch.stack([loss.detach(), (kl * mask).sum().detach() / tokens])
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown[0].item():.6f} kl {shown[1].item():.7f} norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

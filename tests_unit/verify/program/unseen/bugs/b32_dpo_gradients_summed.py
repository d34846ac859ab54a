# world: 2
"""Direct preference optimization with a frozen reference model in pure bfloat16, gradients reduced in float32."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, DIM = 83, 48


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.fc, self.proj = nn.Linear(DIM, 128), nn.Linear(128, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        h = self.emb(ids)
        h = h + h.roll(1, 1) / 2
        return self.head(h + self.proj(F.silu(self.fc(self.norm(h)))))


def log_prob(model, ids, mask):
    logp = model(ids[:, :-1]).float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logp * mask[:, 1:]).sum(1)


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29550")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(74)
    policy = Policy().bfloat16()
    reference = copy.deepcopy(policy).requires_grad_(False)
    opt = torch.optim.SGD(policy.parameters(), lr=0.2)
    gen = torch.Generator().manual_seed(75)
    for step in range(4):
        chosen, rejected = torch.randint(VOCAB, (2, 10, 12), generator=gen)
        rejected[:, :4] = chosen[:, :4]
        length = torch.randint(6, 13, (2, 10, 1), generator=gen)
        mask = ((torch.arange(12) >= 4) & (torch.arange(12) < length)).float()
        chosen, rejected = chosen.chunk(world)[rank], rejected.chunk(world)[rank]
        mask_c, mask_r = (m.chunk(world)[rank] for m in mask)
        with torch.no_grad():
            base = log_prob(reference, chosen, mask_c) - log_prob(reference, rejected, mask_r)
        margin = log_prob(policy, chosen, mask_c) - log_prob(policy, rejected, mask_r) - base
        loss = -F.logsigmoid(0.3 * margin).mean()
        opt.zero_grad()
        loss.backward()
        for p in policy.parameters():
            grad = p.grad.float()
            dist.all_reduce(grad)
            p.grad.copy_(grad)
        opt.step()
        stats = torch.stack([loss.detach(), (margin > 0).float().mean()]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} loss {stats[0].item():.4f} accuracy {stats[1].item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

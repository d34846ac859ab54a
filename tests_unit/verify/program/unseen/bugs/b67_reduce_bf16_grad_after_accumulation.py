# world: 2
"""Pure bfloat16 model, float32 master weights and main_grad; gradients are summed in float32 by hooks."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ACCUM = 2


class Net(nn.Module):
    def __init__(self, vocab=120, dim=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 192), nn.Linear(192, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x.cumsum(1) / 4)


class MasterAdamW:
    def __init__(self, params, lr):
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.inner = torch.optim.AdamW(self.masters, lr=lr, eps=1e-6)

    def step(self):
        for p, m in zip(self.params, self.masters):
            m.grad = p.main_grad
        norm = nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.inner.step()
        with torch.no_grad():
            for p, m in zip(self.params, self.masters):
                p.copy_(m)
        return norm


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29519")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = Net().to(torch.bfloat16)
    works = []
    state = {"last": False}

    def hook(p):
        p.main_grad += p.grad.float() / (world * ACCUM)
        if state["last"]:
            dist.all_reduce(p.grad)
        p.grad = None

    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        p.register_post_accumulate_grad_hook(hook)
    opt = MasterAdamW(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(9)
    for step in range(4):
        for p in model.parameters():
            p.main_grad.zero_()
        total = torch.zeros(())
        for micro in range(ACCUM):
            state["last"] = micro == ACCUM - 1
            ids = torch.randint(120, (8, 11), generator=gen)
            ids[:, 1::2] = (ids[:, 0:-1:2] * 3 + 1) % 120
            ids = ids.chunk(world)[rank]
            loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            total += loss.detach() / ACCUM
        for work in works:
            work.wait()
        works.clear()
        norm = opt.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.4f} norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

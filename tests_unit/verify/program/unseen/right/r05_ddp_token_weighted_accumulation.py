# world: 3
"""Fine-tuning on sequences of unequal length: the loss is the mean over all valid tokens of the global batch,
with gradient accumulation whose last micro-batch is smaller."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, PAD, GLOBAL, MICRO = 89, -100, 21, 3


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 56)
        self.rnn = nn.GRU(56, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def batch(gen):
    lengths = torch.randint(2, 15, (GLOBAL,), generator=gen)
    ids = (torch.randint(VOCAB, (GLOBAL, 1), generator=gen) + torch.arange(15) * 3) % VOCAB
    labels = ids[:, 1:].clone()
    labels[torch.arange(14) >= lengths[:, None]] = PAD
    return ids[:, :-1], labels


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29515")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = DDP(Tagger())
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(5)
    for step in range(4):
        ids, labels = batch(gen)
        items = (labels != PAD).sum()  # valid tokens of the global batch
        ids, labels = ids[rank::world], labels[rank::world]
        items_here = (labels != PAD).sum()
        dist.all_reduce(items_here)
        assert items_here == items
        micros = list(zip(ids.split(MICRO), labels.split(MICRO)))
        total = torch.zeros(())
        opt.zero_grad()
        for i, (x, y) in enumerate(micros):
            sync = contextlib.nullcontext() if i == len(micros) - 1 else model.no_sync()
            with sync:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum") / items
                (loss * world).backward()  # DDP averages over ranks, the loss is a sum over ranks
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f} grad_norm {norm.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

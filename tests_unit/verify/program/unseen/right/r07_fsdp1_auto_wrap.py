# world: 2
"""FullyShardedDataParallel with an auto wrap policy, clip_grad_norm_ of the wrapper and accumulation."""
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Encoder(nn.Module):
    def __init__(self, vocab=77, dim=52):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 123, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.classifier = nn.Linear(dim, 6)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x.mean(1))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    model = FSDP(Encoder(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"),
                 sharding_strategy=ShardingStrategy.FULL_SHARD)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    gen = torch.Generator().manual_seed(2)
    for step in range(3):
        total = 0.0
        for micro in range(2):
            ids = torch.randint(77, (10, 12), generator=gen)
            labels = ids.sum(1) % 6
            ids, labels = ids[rank::world], labels[rank::world]
            loss = F.cross_entropy(model(ids), labels) / 2
            loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(0.7)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{step} {total.item() / world:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

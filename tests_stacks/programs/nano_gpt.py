"""A training script as nanoGPT has it: DDP by hand, gradient accumulation without synchronizing, a clipped norm.

The model, too, is written out: tied embeddings, and causal attention by ``scaled_dot_product_attention``.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Block(nn.Module):
    """A layer of attention and one of two linear functions."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.split, self.join = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """Return the layer's output."""
        parts = self.split(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Returns the loss of rows of tokens."""

    def __init__(self, words, width, layers, tokens):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, rows, targets):
        """Return the mean loss of all tokens."""
        x = self.words(rows) + self.places(torch.arange(rows.shape[1]))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def add_up(_, bucket):
    """Reduce gradients as the bug does: their sum, not divided by the number of ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


broken, steps = "--broken" in sys.argv, 2
dist.init_process_group("gloo")
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
torch.manual_seed(1337)
model = nn.parallel.DistributedDataParallel(GPT(words=61, width=24, layers=2, tokens=12))
if "--summed" in sys.argv:
    model.register_comm_hook(None, add_up)
decayed = [value for value in model.parameters() if value.dim() > 1]
plain = [value for value in model.parameters() if value.dim() == 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01
)
for number, batch in enumerate(torch.randint(0, 61, (3, 12, 13), generator=torch.Generator().manual_seed(1))):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * number / 3))
    for micro, part in enumerate(batch.chunk(steps)):
        rows = part.chunk(world)[rank]
        last = micro == steps - 1
        model.require_backward_grad_sync = last and not broken  # the bug: the last one does not synchronize, either
        (model(rows[:, :-1], rows[:, 1:].contiguous()) / steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()

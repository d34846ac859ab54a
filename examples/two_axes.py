"""Trains a small GPT with tensor, sequence and fully sharded data parallelism on a mesh of two axes, with checkpoints.

hyper-parallel verify program examples/two_axes.py --world-size 4
torchrun --nproc-per-node 4 examples/two_axes.py --steps 3 --save /tmp/checkpoint
torchrun --nproc-per-node 2 examples/two_axes.py --steps 5 --load /tmp/checkpoint
hyper-parallel explain examples/two_axes.py:case --plan examples/two_axes.py:sharded --mesh dp=4,tp=128
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    NoParallel,
    Partial,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    init_device_mesh,
    load,
    parallelize_module,
    save,
)
from hyper_parallel.verify import ParallelPlan

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 31, 16, 4, 12, 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x`` (batch, sequence, WIDTH)."""
        shape = (*x.shape[:-1], -1, WIDTH // HEADS)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x``."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x``."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens and learned positions, blocks, a norm and the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (batch, sequence, VOCABULARY) for ``ids`` (batch, sequence)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def styles(*, local_logits: bool) -> dict[str, Any]:
    """Return the styles: between the layers, activations are split along the sequence."""
    kept = {"use_local_output": False}
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    column, row = ColwiseParallel(**kept), RowwiseParallel(output_layouts=Shard(1), **kept)
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **kept),
        "positions": NoParallel(**kept),
        "blocks.*.norm[12]": SequenceParallel(**kept),
        "blocks.*.attention": gathered,
        "blocks.*.attention.[qkv]": column,
        "blocks.*.attention.o": row,
        "blocks.*.mlp": gathered,
        "blocks.*.mlp.up": column,
        "blocks.*.mlp.down": row,
        "norm": SequenceParallel(**kept),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=local_logits),
    }


def plan(_: DeviceMesh) -> ParallelPlan:
    """Return the plan for both axes at once, for ``explain`` and ``verify model``: the batch is split over ``dp``."""
    return ParallelPlan(styles(local_logits=False), batch={"dp": Shard(0)})


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of a step and the next ones, of all ranks together."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def case() -> tuple[Any, ...]:
    """Return model, batches and loss, for ``explain`` and ``verify model``."""
    torch.manual_seed(0)
    return GPT(), [batch(step) for step in range(3)], lambda logits, each: loss_of(logits, each[-1])


def parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """Apply the plan, then shard each block and what is left of the model over the data axis."""
    parallelize_module(model, mesh["tp"], styles(local_logits=True))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def sharded(_: DeviceMesh) -> Any:
    """Return what parallelizes the model, for ``explain``: each rank gets the batch as it is."""
    return parallel


def main() -> None:
    """Train, from a checkpoint or anew, and save one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--load", help="folder of a checkpoint")
    parser.add_argument("--save", help="folder for one")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    tensor_parallel = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
    data = mesh["dp"]
    if BATCH % data.size():
        parser.error(f"{BATCH} sequences do not divide among {data.size()} data ranks")
    torch.manual_seed(0)
    model = parallel(GPT(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0
    if options.load:
        step = load({"model": model, "optimizer": optimizer, "step": step}, options.load)["step"]
    for number in range(step, options.steps):
        ids, targets = (each.chunk(data.size())[data.get_local_rank()] for each in batch(number))
        loss = loss_of(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = DTensor.from_local(loss.detach(), data, [Partial("avg")]).full_tensor()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {mean.item():.5f}")
    if options.save:
        save({"model": model, "optimizer": optimizer, "step": options.steps}, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

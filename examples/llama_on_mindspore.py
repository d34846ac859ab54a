"""Trains one Llama on PyTorch, and on MindSpore from the checkpoint of the first; both print the same losses.

python examples/llama_on_mindspore.py torch checkpoint
msrun --worker_num 2 --local_worker_num 2 examples/llama_on_mindspore.py mindspore checkpoint

On PyTorch it is one device; on MindSpore each rank has its part of the batch and, by ``fully_shard``, of the model.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from hyper_parallel import fully_shard, get_platform, init_device_mesh
from hyper_parallel.core.checkpoint import load, save

WORDS, WIDTH, HIDDEN, HEADS, LENGTH, BLOCKS, BATCH, STEPS = 19, 12, 20, 3, 5, 2, 6, 3


def batch(step: int) -> np.ndarray:
    """Return words [BATCH, LENGTH + 1]: each sequence with the word that follows it."""
    return np.random.default_rng(step).integers(0, WORDS, (BATCH, LENGTH + 1)).astype(np.int32)


def rotation() -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines [LENGTH, WIDTH / HEADS] of the rotary position embedding."""
    half = WIDTH // HEADS // 2
    angles = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(half) / half))
    angles = np.concatenate([angles, angles], 1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def torch_llama() -> Any:
    """Return the model on PyTorch: words [B, L] to logits [B, L, WORDS]."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
            self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
            def rotated(heads: Any) -> Any:
                first, second = heads.chunk(2, -1)
                return heads * cosine + torch.cat([-second, first], -1) * sine

            normed = self.before(x)
            q, k, v = (
                layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            seen = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            normed = self.between(x)
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.norm, self.head = nn.RMSNorm(WIDTH, 1e-6), nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, words: Any) -> Any:
            x, angles = self.embedding(words), [torch.from_numpy(each) for each in rotation()]
            for block in self.blocks:
                x = block(x, *angles)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Llama()


def causal_attention(query: Any, key: Any, value: Any, cosine: Any, sine: Any) -> Any:
    """Return the attention [B, L, WIDTH] of tensors of that shape, on MindSpore."""
    import mindspore as ms
    from mindspore import mint, ops

    def heads_of(flat: Any) -> Any:
        return mint.permute(flat.reshape(flat.shape[0], LENGTH, HEADS, -1), (0, 2, 1, 3))

    def rotated(heads: Any) -> Any:
        first, second = mint.chunk(heads, 2, -1)
        return heads * cosine + mint.cat([-second, first], -1) * sine

    q, k, v = rotated(heads_of(query)), rotated(heads_of(key)), heads_of(value)
    hidden = ms.Tensor(np.triu(np.full((LENGTH, LENGTH), -1e30, np.float32), 1))
    scores = q @ mint.transpose(k, -2, -1) / math.sqrt(WIDTH // HEADS) + hidden
    return mint.permute(ops.softmax(scores, -1) @ v, (0, 2, 1, 3)).reshape(query.shape)


def mindspore_llama() -> Any:
    """Return the same model on MindSpore; its parameters have the same names."""
    import mindspore as ms
    from mindspore import mint, nn, ops

    class RMSNorm(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = ms.Parameter(mint.ones((WIDTH,)))

        def construct(self, x: Any) -> Any:
            return x * mint.rsqrt(mint.mean(x * x, -1, keepdim=True) + 1e-6) * self.weight

    class Embedding(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = ms.Parameter(mint.zeros((WORDS, WIDTH)))

        def construct(self, words: Any) -> Any:
            return ops.gather(self.weight, words, 0)

    class Block(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = RMSNorm(), RMSNorm()
            self.query, self.key, self.value, self.out = (mint.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.gate, self.up = (mint.nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
            self.down = mint.nn.Linear(HIDDEN, WIDTH, bias=False)

        def construct(self, x: Any, cosine: Any, sine: Any) -> Any:
            normed = self.before(x)
            seen = causal_attention(self.query(normed), self.key(normed), self.value(normed), cosine, sine)
            x = x + self.out(seen)
            normed = self.between(x)
            return x + self.down(mint.nn.functional.silu(self.gate(normed)) * self.up(normed))

    class Llama(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding()
            self.blocks = nn.CellList([Block() for _ in range(BLOCKS)])
            self.norm, self.head = RMSNorm(), mint.nn.Linear(WIDTH, WORDS, bias=False)

        def construct(self, words: Any) -> Any:
            x, angles = self.embedding(words), [ms.Tensor(each) for each in rotation()]
            for block in self.blocks:
                x = block(x, *angles)
            return self.head(self.norm(x))

    return Llama()


def train_on_torch(folder: str) -> list[float]:
    """Save a checkpoint of the initial model to ``folder``, train, and return the losses."""
    import torch

    model = torch_llama()
    save(model, folder)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        words = torch.from_numpy(batch(step)).long()
        loss = torch.nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def train_on_mindspore(folder: str) -> list[float]:
    """Load the checkpoint in ``folder``, train sharded over all ranks, and return the losses."""
    import mindspore as ms

    platform = get_platform()
    ranks = platform.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    model = mindspore_llama()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load(model, folder)
    optimizer = ms.nn.Momentum(model.trainable_params(), 0.1, 0.9)

    def loss_of(words: Any) -> Any:
        return ms.ops.cross_entropy(model(words[:, :-1]).reshape(-1, WORDS), words[:, 1:].reshape(-1))

    loss_and_grads = ms.value_and_grad(loss_of, None, optimizer.parameters)
    losses = []
    for step in range(STEPS):
        words = ms.Tensor(np.split(batch(step), ranks)[mesh.get_local_rank()])
        loss, gradients = loss_and_grads(words)
        optimizer(gradients)
        losses.append(float(platform.all_reduce(loss, op="avg")))
    return losses


def main() -> None:
    """Train on one framework and print the losses."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("framework", choices=["torch", "mindspore"])
    arguments.add_argument("folder", help="of the checkpoint")
    options = arguments.parse_args()
    train = train_on_torch if options.framework == "torch" else train_on_mindspore
    print("losses", *(f"{loss:.4f}" for loss in train(options.folder)), flush=True)


if __name__ == "__main__":
    main()

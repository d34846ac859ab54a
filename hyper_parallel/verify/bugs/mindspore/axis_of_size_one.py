"""Gradients are reduced over a shard axis of size one, so replicas never meet. Reported in verl 7493.

Hybrid sharding reduces over the shard axis, then over the replicas. With one shard it falls back to not sharding, and
the fallback reduces over the shard axis only: over the rank itself.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.experimental import optim
from mindspore.mint import distributed

MESH = {"replicate": 3, "shard": 1}
DIFFERS = ("gradient", "*")
CAUSE = "missing-reduction"
SAMPLES, WIDTH, HIDDEN = 6, 5, 7


def group(axis: str) -> str:
    """Name of this rank's group along an axis of the mesh; the last axis varies fastest."""
    if get_group_size() == 1:
        return "hccl_world_group"
    places = np.arange(get_group_size()).reshape(tuple(MESH.values()))
    along = np.moveaxis(places, list(MESH).index(axis), -1).reshape(-1, MESH[axis])
    ranks = next(row.tolist() for row in along if get_rank() in row)
    name = f"{axis}-{ranks[0]}"
    create_group(name, ranks)
    return name


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(WIDTH, HIDDEN, dtype=ms.float64), nn.Dense(HIDDEN, WIDTH, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.tanh(self.up(x)))


def train(bug: bool) -> None:
    init()
    random, model, ranks = np.random.default_rng(7493), Model(), get_group_size()
    axes = [group(axis) for axis in (("shard",) if bug else ("shard", "replicate"))]
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = (np.array_split(full, ranks)[get_rank()] for full in random.normal(size=(2, SAMPLES, WIDTH)))
        _, gradients = step(Tensor(x.copy()), Tensor(y.copy()))
        for axis in axes:
            for gradient in gradients:
                distributed.all_reduce(gradient, "avg", axis)
        optimizer(gradients)

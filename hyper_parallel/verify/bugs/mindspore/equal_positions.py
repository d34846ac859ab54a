"""All ranks of a sharded sequence use the positions of the first part. Reported in SpecForge 563.

Each rank counts the positions of its tokens from zero, as a single device does. Only the first rank's are right.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"sp": 3}
DIFFERS = ("output", "positions")
CAUSE = "permuted"
TOKENS, WIDTH = 8, 5


class Positions(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.table = Parameter(Tensor(np.ones((TOKENS, WIDTH))))

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.table, ids, 0)


class Model(nn.Cell):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug, self.positions = bug, Positions()
        self.embed, self.out = (nn.Dense(WIDTH, WIDTH, dtype=ms.float64) for _ in range(2))

    def construct(self, x: Tensor) -> Tensor:
        ids = np.arange(len(x)) if self.bug else part(np.arange(TOKENS))
        return self.out(ops.tanh(self.embed(x) + self.positions(Tensor(ids, ms.int32))))


def part(full: np.ndarray, dim: int = 0) -> np.ndarray:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def train(bug: bool) -> None:
    init()
    random, model, reduce = np.random.default_rng(563), Model(bug), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / TOKENS, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        _, gradients = step(Tensor(part(x).copy()), Tensor(part(y).copy()))
        optimizer(tuple(reduce(gradient) for gradient in gradients))
